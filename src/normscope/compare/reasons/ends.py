"""Ways into the first block and out of the last: scale of the embedding, positions, final norm, head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.compare.reasons import pooling
from normscope.compare.reasons.joins import NO_DROPOUT
from normscope.compare.reasons.mixing import dropped
from normscope.compare.reasons.norms import options_of
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
    real_rows,
    residual,
    tell,
)
from normscope.compare.types import Patch

_TYPES = 4
"""Largest number of token types."""


@dataclass(frozen=True)
class Embedded:
    """entry = times·embedding + positions.

    Attributes:
        positions: (T, D), the same in all sequences; None where there are none.
        table: parameter whose rows they are, and the number of the first row; None where none fits.
    """

    times: float
    positions: Tensor | None
    table: tuple[str, int] | None


def embedding(scene: Scene) -> Reasons:
    """Differences between the token embedding and the first block."""
    if scene.is_same("entry"):
        return
    a, b = _read(scene.a), _read(scene.b)
    if ("embedding norm" in scene.a.norms) != ("embedding norm" in scene.b.norms):
        yield from _normed(scene)
    if a is None or b is None:
        yield from _places(scene)
        return
    if isinstance(a, float) or isinstance(b, float):
        words = [f"rate {figure(each)}" if isinstance(each, float) else "none" for each in (a, b)]
        message = f"Dropout of the embedding is left on in eval mode: {words[0]} in A and {words[1]} in B."
        yield Reason("dropout-left-on", "entry", words[0], words[1], message, NO_DROPOUT)
        return
    now = {"by": b.times, "what": 0.0 if b.positions is None else b.positions}

    def reason(name: str, left: Any, right: Any, message: str, **to: Any) -> Reason:
        now.update(to)
        step = sum_step(scene.b)
        return Reason(name, step, left, right, message, scene.b.patch(step, "affine", ("embedding",), **now))

    if abs(a.times - b.times) > FITS * abs(a.times):
        message = tell("The factor on the token embeddings", *(_root(scene, each.times) for each in (a, b)))
        yield reason("embedding-scale", a.times, b.times, message, by=a.times)
    yield from _positions(a, b, reason)


def _places(scene: Scene) -> Reasons:
    """Rows of the position table that depend on the sequence, as where they are counted from its mask."""
    tables = [_rows(half) for half in (scene.a, scene.b)]
    if tables[0] is None or tables[1] is None:
        yield from _added(scene)
        return
    (a, rest), (b, _) = tables[0], tables[1]
    off = real_rows((b - a)[..., None], scene.real)
    if not bool(off.any()):
        yield from _added(scene)
        return
    low, high = int(off.min()), int(off.max())
    words = f"{low:+d}" if low == high else f"between {low:+d} and {high:+d}, by the sequence,"
    message = f"The row of the position table for a token in B is {words} rows from that in A."
    step = sum_step(scene.b)
    patches = scene.b.patch(step, "affine", ("embedding",), what=rest)
    yield Reason("position-offset", step, None, None, message, patches)


def _rows(half: Half) -> tuple[Tensor, Tensor] | None:
    """Rows (B, T) of the table that are added to the embeddings, and what is added; None where none fits."""
    found = half.all_of("embedding", sum_step(half))
    if found is None or found[0].shape != found[1].shape:
        return None
    rest = found[1] - found[0]
    tables = [v for v in half.parameters.values() if v.dim() == 2 and v.shape[-1] == rest.shape[-1]]
    shared = [row for table in tables if len(table) <= _TYPES for row in table]  # as of token types
    for table in tables:
        for row in (torch.zeros_like(rest[0, 0]), *shared):
            gaps = torch.cdist((rest - row).flatten(0, 1), table)
            nearest = gaps.min(1)
            if float(nearest.values.max()) < FITS * float(rest.norm(dim=-1).max()):
                return nearest.indices.reshape(rest.shape[:2]), rest
    return None


def _added(scene: Scene) -> Reasons:
    """Reasons that one side alone adds a tensor to the stream, where the embeddings are unknown."""
    step = sum_step(scene.b)
    both = scene.both(step)
    if both is None or both[0][0].shape != both[1][0].shape or both[0][0].dim() != 3:
        return
    rest = both[0][0] - both[1][0]
    what = rest.mean(0)
    if len(rest) < 2 or residual(what.expand_as(rest), rest) > FITS:
        return
    of_a, of_b = _table(scene.a, what) is not None, _table(scene.b, -what) is not None
    words = ["added to the embeddings" if each else "none" for each in (of_a, of_b)]
    message = "The positions that are added at the entry have other values in A than in B."
    if of_a != of_b:
        message = tell("The position embedding", *words)
    patches = scene.b.patch(step, "add", what=what)
    yield Reason("positions", step, words[0], words[1], message, patches)


def sum_step(half: Half) -> str:
    """Name of the step that is the sum of the embeddings."""
    return "embedding norm in" if "embedding norm in" in half.steps else "entry"


def _normed(scene: Scene) -> Reasons:
    """A norm after the embedding that one side lacks."""
    norms = [half.norms.get("embedding norm") for half in (scene.a, scene.b)]
    words = ["none" if norm is None else norm.kind for norm in norms]
    if norms[0] is None:
        patches = scene.b.patch("embedding norm", "affine", ("embedding norm in",))
    else:
        patches = scene.b.patch("entry", "norm_of_itself", **options_of(scene.a, "embedding norm"))
    message = tell("The norm after the embeddings", *words)
    yield Reason("embedding-norm", "entry", words[0], words[1], message, patches)


def _positions(a: Embedded, b: Embedded, reason: Any) -> Reasons:
    left, right = a.positions, b.positions
    if left is None and right is None:
        return
    what = 0.0 if left is None else left
    if left is None or right is None:
        words = ["none" if each is None else "added to the embeddings" for each in (left, right)]
        has = "AB"[left is None]
        message = f"Position embeddings are added to the token embeddings only in {has}."
        yield reason("positions", *words, message, what=what)
    elif distance(left, right) > FITS:
        if a.table is not None and b.table is not None and a.table[1] != b.table[1]:
            message = tell("The row of the position table for the first token", a.table[1], b.table[1])
            yield reason("position-offset", a.table[1], b.table[1], message, what=what)
            return
        rest = left - right
        if residual(rest.mean(0).expand_as(rest), rest) < FITS:
            message = (
                "On one side the same vector is added to the embeddings of all tokens, like a token type."
            )
            yield reason("token-types", None, None, message, what=what)
            return
        if (shift := _shift(left, right)) is not None:
            way = "later" if shift > 0 else "earlier"
            message = f"The positions in B are those of A, {abs(shift)} tokens {way}."
            yield reason("position-offset", 0, shift, message, what=what)
            return
        c, gap = factor(left, right)
        if gap < FITS:
            message = f"The position embeddings in A are {figure(clean(c))} times those in B."
            yield reason("position-scale", clean(c), 1.0, message, what=what)
            return
        yield reason(
            "positions", None, None, "The position embeddings have other values in A than in B.", what=what
        )


def _shift(a: Tensor, b: Tensor) -> int | None:
    """s with b[t] = a[t + s]."""
    for shift in range(1, min(8, len(a) - 1)):
        if residual(b[:-shift], a[shift:]) < FITS:
            return shift
        if residual(b[shift:], a[:-shift]) < FITS:
            return -shift
    return None


def _root(scene: Scene, times: float) -> str:
    width = scene.b.steps["entry"].shape[-1]
    return f"√{width} = {figure(times)}" if abs(times - width**0.5) < 1e-6 * times else figure(times)


def _read(half: Half) -> Embedded | float | None:
    """Start of the stream; a number is the rate of a dropout; None where neither fits."""
    found = half.all_of("embedding", sum_step(half))
    if found is None or found[0].shape != found[1].shape or found[0].dim() != 3 or len(found[0]) < 2:
        return None
    x, y = found
    spread_x, spread_y = x - x.mean(0), y - y.mean(0)
    # Tokens that are the same in all sequences say nothing on the factor.
    c, gap = factor(spread_y, spread_x)
    if gap > FITS:
        return dropped(x, y)
    rest = (y - c * x).mean(0)
    if float(rest.norm()) < 1e-7 * float(y.norm()):
        return Embedded(clean(c), None, None)
    return Embedded(clean(c), rest, _table(half, rest))


def _table(half: Half, positions: Tensor) -> tuple[str, int] | None:
    for name, parameter in half.parameters.items():
        value = parameter.squeeze(0) if parameter.dim() == 3 else parameter
        if value.dim() == 2 and value.shape[-1] == positions.shape[-1] and len(value) >= len(positions):
            for first in range(min(8, len(value) - len(positions) + 1)):
                if residual(value[first : first + len(positions)], positions) < FITS:
                    return name, first
    return None


def head(scene: Scene) -> Reasons:
    """Differences between the last block and the output."""
    a, b = scene.a, scene.b
    if ("final norm" in a.norms) != ("final norm" in b.norms) and not scene.is_same("hidden"):
        yield _final_norm(scene)
    output = "output of the model"
    both = scene.both(output)
    if both is None or not pooling.reads_same(scene) or scene.is_same(output):
        return
    (left,), (right,) = both
    if left.shape != right.shape:
        return
    if (found := pooling.reason(scene)) is not None:
        yield found
        return
    c, gap = factor(left, right)
    if gap < FITS:
        message = f"The output logits in A are {figure(clean(c))} times those in B."
        yield Reason("head-scale", output, clean(c), 1.0, message, (Patch("output", "", c),))
        return
    shift = left - right
    if shift.dim() == 3 and residual(shift[:1, :1].expand_as(shift), shift) < FITS:
        message = "The head's bias differs: the outputs differ by the same numbers at every token."
        yield Reason(
            "head-bias", output, None, None, message, (Patch("output", "", ("add", {"what": shift[0, 0]})),)
        )
        return
    for one, two, is_a in ((left, right, True), (right, left, False)):
        if (cap := _cap(one, two)) is not None:
            words = (figure(cap), "none") if is_a else ("none", figure(cap))
            message = tell("The soft cap of the output logits", *words)
            to: dict[str, Any] = {"to": cap} if is_a else {"was": cap}
            yield Reason("head-cap", output, words[0], words[1], message, (Patch("output", "", ("cap", to)),))
            return
    tables = [_head_table(half) for half in (a, b)]
    if None not in tables and tables[0] != tables[1]:
        message = f"The head's weight is {tables[0]} in A and {tables[1]} in B."
        yield Reason(
            "tied-head",
            output,
            tables[0],
            tables[1],
            message,
            (Patch("output", "", ("set", {"value": left})),),
        )
        return
    message = "The head gives other values from the same input: its weights or its computation differ."
    yield Reason("weights", output, None, None, message, (Patch("output", "", ("set", {"value": left})),))


def _final_norm(scene: Scene) -> Reason:
    words = [
        half.norms["final norm"].kind if "final norm" in half.norms else "none" for half in (scene.a, scene.b)
    ]
    message = tell("The final norm", *words)
    if "final norm" in scene.b.norms:
        return Reason(
            "final-norm",
            "hidden",
            words[0],
            words[1],
            message,
            scene.b.patch("final norm", "affine", ("final norm in",)),
        )
    patches = scene.b.patch("hidden", "norm_of_itself", **options_of(scene.a, "final norm"))
    return Reason("final-norm", "hidden", words[0], words[1], message, patches)


def _cap(y: Tensor, x: Tensor) -> float | None:
    """The cap with y = cap·tanh(x/cap)."""
    place = int((x.abs() - y.abs()).argmax())
    big, small = float(x.flatten()[place].abs()), float(y.flatten()[place].abs())
    if small >= big or small == 0:
        return None
    low, high = small, small * 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        if middle * torch.tanh(torch.tensor(big / middle, dtype=torch.float64)).item() > small:
            high = middle
        else:
            low = middle
    cap = float(f"{middle:.4g}") if abs(float(f"{middle:.4g}") - middle) < 1e-5 * middle else middle
    return cap if residual(cap * torch.tanh(x / cap), y) < FITS else None


def _head_table(half: Half) -> str | None:
    """Name of the parameter that makes the output from the hidden stream."""
    hidden, output = half.steps["hidden"], half.steps["output of the model"]
    for name, value in half.parameters.items():
        fits = value.dim() == 2 and tuple(value.shape) == (output.shape[-1], hidden.shape[-1])
        if fits and factor(output, hidden @ value.to(hidden).mT)[1] < FITS:
            return name
    return None
