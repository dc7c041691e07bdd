"""Join of a branch and the stream: the scales of both, and where the residual comes from."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.compare.reasons.mixing import dropped
from normscope.compare.reasons.scene import (
    FITS,
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
    """

    source: str
    stream: float
    branch: float | Tensor


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
    sources = tuple(dict.fromkeys((a.source, *_outputs(scene.b))))
    extra: dict[str, Any] = {}
    if isinstance(a.branch, Tensor):
        return
    known = [name for name in _outputs(scene.b) if name in scene.b.places]
    patches: tuple[Patch, ...] = ()
    if known:
        sources = (a.source, known[0]) if a.source != "none" else (known[0],)
        factors = (a.stream, a.branch) if a.source != "none" else (a.branch,)
        patches = scene.b.patch("sum", "combine", sources, factors=factors, **extra)
    if a.source != b.source:
        message = f"The branch is added to {_source(a.source)} in A and to {_source(b.source)} in B."
        yield Reason("residual-source", "sum", a.source, b.source, message, patches)
    if a.stream != b.stream and a.source != "none" != b.source:
        message = tell("The factor on the stream where the branch is added", a.stream, b.stream)
        yield Reason("stream-scale", "sum", a.stream, b.stream, message, patches)
    if isinstance(b.branch, Tensor) or a.branch != b.branch:
        right: Any = "one for each feature" if isinstance(b.branch, Tensor) else b.branch
        message = tell("The factor on the branch", a.branch, right)
        yield Reason("branch-scale", "sum", a.branch, right, message, patches)


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
    return [name for name in (*names, "o", "down", "output") if name in half.steps]


def _read(half: Half) -> Join | None:
    """The join of one side; None where none fits."""
    total = half.steps.get("sum")
    if total is None:
        return None
    outputs = _outputs(half)
    if not outputs:
        return None
    output = half.steps[outputs[0]]
    sources = [
        ("entry", half.steps.get("entry")),
        ("norm 0", half.steps.get("norm 0")),
        ("block entry", half.block_entry),
    ]
    best: tuple[float, Join] | None = None
    for name, source in sources:
        if source is None or source.numel() != total.numel() or output.numel() != total.numel():
            continue
        stream, branch, gap = _combination(source.flatten(), output.flatten(), total.flatten())
        if gap < FITS and (best is None or gap < 0.1 * best[0]):
            best = gap, Join(name, _tidy(stream), _tidy(branch))
    if best is not None:
        return best[1]
    c, gap = factor(total, output.reshape(total.shape))
    return Join("none", 0.0, _tidy(c)) if gap < FITS else None


def _tidy(value: float) -> float:
    rounded = float(f"{value:.6g}")
    return clean(value) if abs(rounded - value) > 1e-9 * max(1.0, abs(value)) else rounded


def _combination(x: Tensor, y: Tensor, total: Tensor) -> tuple[float, float, float]:
    """α, β and the residual of total ≈ α·x + β·y, which keeps a β of a small y."""
    pair = torch.stack([x / x.norm().clamp_min(1e-300), y / y.norm().clamp_min(1e-300)], 1)
    solution = torch.linalg.lstsq(pair, total[:, None]).solution[:, 0]
    rest = total - pair @ solution
    alpha, beta = (
        float(solution[0] / x.norm().clamp_min(1e-300)),
        float(solution[1] / y.norm().clamp_min(1e-300)),
    )
    part = max(abs(beta) * float(y.norm()), 1e-300)
    # The residual is relative to the branch, whose part in the sum may be small.
    return alpha, beta, float(rest.norm()) / min(part, float(total.norm()))


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
