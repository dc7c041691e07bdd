"""Logits of an attention: their scale, soft cap, added bias and mask."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normscope.compare.formulas import MASKED, spread
from normscope.compare.reasons.operands import read_operand
from normscope.compare.reasons.scene import (
    FITS,
    Half,
    Reason,
    Reasons,
    Scene,
    also,
    clean,
    distance,
    factor,
    figure,
    real_rows,
    residual,
    tell,
)

_CLOSE = 1e-8


@dataclass(frozen=True)
class Logits:
    """Logits as times·q·kᵀ + bias, capped and masked.

    Attributes:
        visible: bool (B or 1, H or 1, T, S).
        times: factor on the product of the operands, as captured.
        operands: factor that the operands already have on the projections' outputs.
        bias: (1, H, T, S), None without one.
        cap: None without one.
        is_read: whether the projections of both operands are known, so that `operands` is.
    """

    visible: Tensor
    times: float
    operands: float
    bias: Tensor | None
    cap: float | None
    is_read: bool = True

    @property
    def scale(self) -> float:
        """Factor on the product of q and k as the projections (and norms) give them."""
        return clean(self.times * self.operands)


def read_logits(half: Half) -> Logits | None:
    """Description of the way in which the logits are made; None where no description fits."""
    found = half.all_of("query", "key", "logits")
    if found is None or any(t.dim() != 4 for t in found):
        return None
    query, key, logits = found
    key = spread(key, query.shape[1])
    if query.shape[1] != key.shape[1] or query.shape[-1] != key.shape[-1]:
        return None
    product = query @ key.mT
    if product.shape != logits.shape:
        return None
    visible = logits > MASKED
    ways = [read_operand(half, before, after) for before, after in (("q", "query"), ("k", "key"))]
    operands = math.prod(way.times for way in ways if way is not None)
    fitted = (
        _plain(product, logits, visible)
        or _capped(product, logits, visible)
        or _biased(product, logits, visible)
    )
    if fitted is None:
        return None
    times, bias, cap = fitted
    return Logits(_narrow(visible), times, operands, bias, cap, None not in ways)


_Fit = tuple[float, Tensor | None, float | None]


def _plain(product: Tensor, logits: Tensor, visible: Tensor) -> _Fit | None:
    c, gap = factor(logits[visible], product[visible])
    return (clean(c), None, None) if gap < _CLOSE else None


def _capped(product: Tensor, logits: Tensor, visible: Tensor) -> _Fit | None:
    """c and cap of cap·tanh(c·x/cap), by Gauss–Newton steps on (c, 1/cap²)."""
    x, y = product[visible], logits[visible]
    cubes = torch.stack([x, x**3], 1)
    try:
        linear, cubic = torch.linalg.lstsq(cubes, y[:, None]).solution[:, 0].tolist()
    except RuntimeError:
        return None
    if linear == 0 or cubic / linear**3 >= 0:
        return None
    c, inverse = linear, math.sqrt(-3 * cubic / linear**3)
    for _ in range(30):
        if not (math.isfinite(c) and math.isfinite(inverse)) or inverse <= 0:
            return None
        bent = torch.tanh(c * x * inverse)
        gap = y - bent / inverse
        slope_c = (1 - bent**2) * x
        slope_i = (1 - bent**2) * c * x / inverse - bent / inverse**2
        step = torch.linalg.lstsq(torch.stack([slope_c, slope_i], 1), gap[:, None]).solution[:, 0]
        c, inverse = c + float(step[0]), inverse + float(step[1])
    if not (math.isfinite(c) and inverse > 0):
        return None
    if residual(torch.tanh(c * x * inverse) / inverse, y) > _CLOSE:
        return None
    return _round(c), None, _round(1 / inverse)


def _biased(product: Tensor, logits: Tensor, visible: Tensor) -> _Fit | None:
    """c and a bias that is the same in all sequences."""
    if len(product) < 2:
        return None
    seen = visible.all(0, keepdim=True)
    rows = seen.expand_as(product)
    spread_x, spread_y = product - product.mean(0, keepdim=True), logits.masked_fill(~rows, 0.0)
    spread_y = spread_y - spread_y.mean(0, keepdim=True)
    c, gap = factor(spread_y[rows], spread_x[rows])
    if gap > _CLOSE:
        return None
    rest = torch.where(rows, logits - c * product, 0.0)
    return clean(c), rest.mean(0, keepdim=True), None


def _round(value: float) -> float:
    rounded = float(f"{value:.4g}")
    return rounded if abs(rounded - value) < 1e-5 * abs(value) else value


def _narrow(visible: Tensor) -> Tensor:
    """Without the axes along which it is constant."""
    for axis in (0, 1):
        first = visible.narrow(axis, 0, 1)
        if bool((visible == first).all()):
            visible = first
    return visible


def pattern(visible: Tensor) -> str:
    """The keys that a query sees, in words."""
    num_queries, num_keys = visible.shape[-2:]
    if bool(visible.all()):
        return "all keys"
    if visible.shape[0] > 1:
        base = visible.any(0, keepdim=True)
        keys = visible.any(2, keepdim=True)
        inner = pattern(base)
        if torch.equal(base & keys, visible):
            return "keys that are no padding" if inner == "all keys" else f"{inner}, without padding"
        return "keys that depend on the sequence"
    rows = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
    back = (rows - torch.arange(num_keys)[None]).to(visible.device)
    seen = visible.flatten(0, -3)
    if not all(torch.equal(seen[0], each) for each in seen):
        return "keys that depend on the head"
    first = seen[0]
    if torch.equal(first, back >= 0):
        return "earlier keys"
    if torch.equal(first, back > 0) or torch.equal(first[1:], (back > 0)[1:]):
        return "earlier keys without its own"
    shown = back[first]
    reach = int(shown.max()) + 1 if shown.numel() else 0
    if torch.equal(first, (back >= 0) & (back < reach)):
        return f"the last {reach} keys"
    if torch.equal(first, back.abs() < reach):
        return f"keys at most {reach - 1} tokens away"
    ahead = -int(shown.min()) if shown.numel() else 0
    if ahead > 0 and torch.equal(first, back >= -ahead):
        return f"earlier keys and {ahead} later ones"
    if not bool((first & (back < 0)).any()):
        return "some earlier keys"
    return "some keys"


def reasons(scene: Scene) -> Reasons:
    """Differences of the scale, the cap, the bias and the mask."""
    if scene.is_same("logits") or not scene.is_alike:
        return
    a, b = read_logits(scene.a), read_logits(scene.b)
    if a is None or b is None:
        yield from _masks_alone(scene)
        return
    a, b = _with_operands(scene, a, b)
    sinks = scene.b.steps["logits"].shape == scene.a.steps["logits"].shape
    change: dict[str, Any] = {"by": b.times, "visible": b.visible, "bias": b.bias, "cap": b.cap}

    def reason(name: str, left: Any, right: Any, message: str, **to: Any) -> Reason:
        change.update(to)
        patches = scene.b.patch("logits", "attend", ("query", "key"), **change) if sinks else ()
        return Reason(name, "logits", left, right, message, patches)

    if abs(a.scale - b.scale) > FITS * abs(a.scale):
        message = tell(
            "The factor on the attention's logits",
            *(_scale_words(half, s) for half, s in ((scene.a, a.scale), (scene.b, b.scale))),
        )
        by = b.times * a.scale / b.scale if b.scale else a.times
        yield reason("attention-scale", a.scale, b.scale, message, by=by)
    if not _same_cap(a.cap, b.cap):
        left, right = (("none" if cap is None else cap) for cap in (a.cap, b.cap))
        yield reason(
            "logit-cap", left, right, tell("The soft cap of the attention's logits", left, right), cap=a.cap
        )
    if (a.bias is None) != (b.bias is None) or (
        a.bias is not None and b.bias is not None and distance(a.bias, b.bias) > FITS
    ):
        left, right = bias_words(a.bias), bias_words(b.bias)
        message = tell("The bias that is added to the attention's logits", left, right)
        if left == right:
            message = "The biases that are added to the attention's logits have other values in A than in B."
        yield reason("attention-positions", left, right, message, bias=a.bias)
    if not _same_mask(scene, a.visible, b.visible):
        yield _mask(scene, a.visible, b.visible, reason)


def _with_operands(scene: Scene, a: Logits, b: Logits) -> tuple[Logits, Logits]:
    """Both with the factor on their operands, where it was read on one side alone: by their products."""
    both = scene.both("query", "key")
    if a.is_read == b.is_read or both is None:
        return a, b
    products = [query @ spread(key, query.shape[1]).mT for query, key in both]
    if products[0].shape != products[1].shape:
        return a, b
    c, gap = factor(products[0], products[1])
    if gap > FITS or not c:
        return a, b
    if b.is_read:
        return replace(a, operands=c * b.operands), b
    return a, replace(b, operands=a.operands / c)


def _masks_alone(scene: Scene) -> Reasons:
    """The masks where the logits themselves were not understood."""
    both = scene.both("logits")
    if both is None or both[0][0].shape != both[1][0].shape or both[0][0].dim() != 4:
        return
    (a,), (b,) = both
    seen_a, seen_b = a > MASKED, b > MASKED
    shared = seen_a & seen_b
    if not torch.equal(seen_a, seen_b) and residual(a[shared], b[shared]) < FITS:

        def reason(name: str, left: Any, right: Any, message: str, **to: Any) -> Reason:
            put = (
                scene.b.patch("logits", "hide", (), visible=to["visible"])
                if bool((seen_a <= seen_b).all())
                else ()
            )
            return Reason(name, "logits", left, right, message, put)

        yield _mask(scene, _narrow(seen_a), _narrow(seen_b), reason)


def _mask(scene: Scene, a: Tensor, b: Tensor, reason: Any) -> Reason:
    left, right = pattern(a), pattern(b)
    name = "mask"
    if "padding" in left or "padding" in right:
        name = "padding-mask"
    elif "last" in left or "last" in right or "away" in left or "away" in right:
        name = "window"
    elif {left, right} == {"earlier keys", "all keys"}:
        name = "causal"
    message = f"Queries see {left} in A and {right} in B."
    if left == right:
        message = f"Queries see {left} in both, but not the same ones."
    found: Reason = reason(name, left, right, message, visible=a)
    words = f"a window of at least {a.shape[-1]} tokens"
    sides = (("A", left), ("B", right))
    if name == "window":
        tied = [(side, [words]) for side, seen in sides if seen in ("earlier keys", "all keys")]
        found = replace(found, others=also("the mask", tied))
    return found


def _same_mask(scene: Scene, a: Tensor, b: Tensor) -> bool:
    """Whether the queries of the tokens that count see the same keys."""
    try:
        differ = a != b
    except RuntimeError:
        return False
    if scene.real is not None and differ.dim() == 4:
        differ = real_rows(differ.expand(len(scene.real), *differ.shape[1:]), scene.real)
    return not bool(differ.any())


def _same_cap(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) < 1e-4 * a)


def _scale_words(half: Half, scale: float) -> str:
    """The factor, as 1/√K or 1/K where it is one of these."""
    features = half.steps["query"].shape[-1]
    for word, value in ((f"1/√{features}", features**-0.5), (f"1/{features}", 1 / features)):
        if abs(scale - value) < FITS * value:
            return f"{word} = {figure(scale)}"
    return figure(scale)


def bias_words(bias: Tensor | None) -> str:
    """A bias of the logits, in words."""
    if bias is None:
        return "none"
    num_queries, num_keys = bias.shape[-2:]
    if num_queries != num_keys or num_queries < 3:
        return "a bias"
    differences = bias[..., 1:, :-1] - bias[..., :-1, :-1]
    lower = torch.ones(num_queries - 1, num_keys - 1, dtype=torch.bool).tril().expand_as(differences)
    values = differences[lower]
    along = bias[..., 1:, 1:] - bias[..., :-1, :-1]
    if bool((along[lower].abs() > FITS * bias.abs().max()).any()):
        return "a bias"
    slope = differences.masked_fill(~lower, 0.0).sum((-1, -2)) / lower[0, 0].sum()
    if bool(
        (values - slope[..., None, None].expand_as(differences)[lower]).abs().max() < FITS * bias.abs().max()
    ):
        return "ALiBi"
    return "a bias by relative position"
