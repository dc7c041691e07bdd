"""Join of a branch and the stream: the scales of both, and where the residual comes from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.compare.reasons.mixing import dropped
from normscope.compare.reasons.scene import (
    FITS,
    ROUNDING,
    Half,
    Reason,
    Reasons,
    Scene,
    clean,
    distance,
    factor,
    figure,
    tell,
)
from normscope.compare.types import Patch

NO_DROPOUT = (
    Patch("function", "", ("dropout", {"training": False})),
    Patch("function", "", ("scaled_dot_product_attention", {"dropout_p": 0.0})),
)
"""Patches that switch off the dropout that a forward asks for itself."""


@dataclass(frozen=True)
class Join:
    """sum = stream·source + branch·(last projection).

    Attributes:
        source: name of the step that the branch is added to.
        stream: factor on it.
        branch: factor on the output of the last projection (after its norm): a number, or one per feature.
        others: factors on the outputs of parallel branches.
    """

    source: str
    stream: float
    branch: float | Tensor
    others: tuple[float, ...] = ()


def reasons(scene: Scene) -> Reasons:
    """Differences between the last projection and the sum."""
    last = _last(scene)
    if last is not None:
        yield from _dropouts(scene, last)
    if scene.is_same("sum"):
        return
    a, b = _read(scene.a), _read(scene.b)
    if a is None or b is None:
        return
    known = [name for name in _outputs(scene.b) if name in scene.b.places]
    patches: tuple[Patch, ...] = ()
    if known:
        sources = (a.source, known[0]) if a.source != "none" else (known[0],)
        factors = (a.stream, a.branch) if a.source != "none" else (a.branch,)
        sources, factors = (*sources, *scene.b.parallel), (*factors, *a.others)
        patches = scene.b.patch("sum", "combine", sources, factors=factors)
    if a.source != b.source:
        message = f"The branch is added to {_source(a.source)} in A and to {_source(b.source)} in B."
        yield Reason("residual-source", "sum", a.source, b.source, message, patches)
    if a.stream != b.stream and a.source != "none" != b.source:
        message = tell("The factor on the stream where the branch is added", a.stream, b.stream)
        yield Reason("stream-scale", "sum", a.stream, b.stream, message, patches)
    if isinstance(a.branch, Tensor) or isinstance(b.branch, Tensor):
        yield _by_features(a, b, patches)
    elif a.branch != b.branch:
        message = tell("The factor on the branch", a.branch, b.branch)
        yield Reason("branch-scale", "sum", a.branch, b.branch, message, patches)
    for left, other in zip(a.others, b.others, strict=False):
        if left != other:
            message = tell("The factor on the branch that is parallel to this one", left, other)
            yield Reason("branch-scale", "sum", left, other, message, patches)


def _by_features(a: Join, b: Join, patches: tuple[Patch, ...]) -> Reason:
    kinds = ["learnt" if isinstance(each.branch, Tensor) else "add" for each in (a, b)]
    words = ["a scale for each feature" if kind == "learnt" else "a sum" for kind in kinds]
    message = f"The branch joins the stream by {words[0]} in A and by {words[1]} in B."
    if kinds[0] == kinds[1]:
        message = "The branch joins the stream by other scales for each feature in A than in B."
    return Reason("join", "sum", kinds[0], kinds[1], message, patches)


def _source(name: str) -> str:
    words = {
        "entry": "the stream",
        "norm 0": "the output of the norm",
        "none": "nothing",
        "block entry": "the stream at the entry of the block",
    }
    return words.get(name, name)


def _last(scene: Scene) -> str | None:
    return next((name for name in ("o", "down") if name in scene.a.steps and name in scene.b.steps), None)


def _outputs(half: Half) -> list[str]:
    """Steps that may be the added term without its scale: the last norm, else the projection."""
    names = [half.slots["out"]] if "out" in half.slots else []
    total = half.steps["sum"].numel() if "sum" in half.steps else 0
    return [n for n in (*names, "o", "down", "output") if n in half.steps and half.steps[n].numel() == total]


def _read(half: Half) -> Join | None:
    """The join of one side; None where none fits."""
    total = half.steps.get("sum")
    if total is None:
        return None
    outputs = _outputs(half)
    if not outputs:
        return None
    output, others = half.steps[outputs[0]], half.all_of(*half.parallel) or ()
    sources = [
        ("entry", half.steps.get("entry")),
        ("norm 0", half.steps.get("norm 0")),
        ("block entry", half.block_entry),
    ]
    best: tuple[float, Join] | None = None
    for name, source in sources:
        if source is None or source.numel() != total.numel() or output.numel() != total.numel():
            continue
        (stream, branch, *rest), gap = _combination((source, output, *others), total)
        gap = max(gap, ROUNDING)
        if gap < FITS and (best is None or gap < 0.1 * best[0]):
            best = gap, Join(name, _tidy(stream), _tidy(branch), tuple(map(_tidy, rest)))
    if best is not None:
        return best[1]
    entry = half.steps.get("entry")
    if entry is not None and not others and entry.numel() == total.numel() == output.numel():
        scales = _for_each_feature(total - entry.reshape(total.shape), output.reshape(total.shape))
        if scales is not None:
            return Join("entry", 1.0, scales)
    c, gap = factor(total, output.reshape(total.shape))
    return Join("none", 0.0, _tidy(c)) if gap < FITS else None


def _for_each_feature(added: Tensor, output: Tensor) -> Tensor | None:
    """The factors with added = factors · output, one for each feature; None where there are none."""
    a, b = added.flatten(0, -2), output.flatten(0, -2)
    factors = (a * b).sum(0) / (b * b).sum(0).clamp_min(1e-300)
    return factors if float((a - factors * b).norm()) < FITS * float(a.norm()) else None


def _tidy(value: float) -> float:
    rounded = float(f"{value:.6g}")
    return clean(value) if abs(rounded - value) > 1e-9 * max(1.0, abs(value)) else rounded


def _combination(terms: Sequence[Tensor], total: Tensor) -> tuple[list[float], float]:
    """Factors of total ≈ α·stream + β·branch + …, and a residual that keeps a β of a small branch."""
    flat, whole = [term.flatten() for term in terms], total.flatten()
    if not all(bool(each.isfinite().all()) for each in (*flat, whole)):
        return [0.0] * len(flat), float("inf")
    sizes = torch.stack([each.norm().clamp_min(1e-300) for each in flat])
    units = torch.stack(flat, 1) / sizes
    solution = torch.linalg.lstsq(units, whole[:, None]).solution[:, 0]
    rest = float((whole - units @ solution).norm())
    part = max(float(solution[1].abs()), 1e-300)
    # The residual is relative to the branch, whose part in the sum may be small.
    return (solution / sizes).tolist(), rest / min(part, float(whole.norm()))


def _dropouts(scene: Scene, last: str) -> Reasons:
    rates = [_rate(half, last) for half in (scene.a, scene.b)]
    if rates[0] != rates[1]:
        words = ["none" if rate is None else f"rate {figure(rate)}" for rate in rates]
        message = f"Dropout of the branch is left on in eval mode: {words[0]} in A and {words[1]} in B."
        yield Reason("dropout-left-on", "output", words[0], words[1], message, NO_DROPOUT)


def _rate(half: Half, last: str) -> float | None:
    found = half.all_of(last, "output")
    if found is None or found[0].numel() != found[1].numel():
        return None
    before, after = found[0].reshape(found[1].shape), found[1]
    return None if distance(before, after) < FITS else dropped(before, after)
