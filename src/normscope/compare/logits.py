"""Facts of an attention's logits, from the numbers between the product q·kᵀ and the softmax."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.anatomy.attention import Attention
from normscope.anatomy.graph import Op, Value, between
from normscope.anatomy.ops import matmul_operands
from normscope.anatomy.replay import CannotReplay, Replay
from normscope.compare.ways import Way

Facts = dict[str, Any]
_MASKED = -1e4
"""Logits below this are masked out: implementations write −inf, the smallest float, −1e9 or −1e4."""
_TINY, _HUGE = 1e-3, 1e6


def logit_facts(a: Attention, ways: Iterable[Way | None], replay: Replay) -> Facts:
    """Scale, soft cap, sinks, and the kind of the positions that are added, None without."""
    op = _product(a)
    if op is None or not op.outputs:
        return {}
    product = op.outputs[0]
    part = between(product, a.logits)
    if not part and product is not a.logits:
        return {}
    facts: Facts = {"sinks": any(v.is_weight and value.base == "cat" for value in part for v in value.inputs)}
    try:
        found = replay.once(_softmaxed, [product], [a.logits])
        slope, bias = found.slope, found.bias
        slope = slope * op.kwargs.get("alpha", 1)
        if op.base == "baddbmm" and op.kwargs.get("beta", 1):  # BLOOM: the matmul itself adds the bias
            rows = op.kwargs.get("beta", 1) * replay.fixed(op.inputs[0]).expand(product.shape)
            rows = rows + found.zero.reshape(product.shape)
            bias = _bias_kind(rows, is_learnt=op.inputs[0].learnt)
    except CannotReplay:
        return facts
    scales = [_scale(way, replay) for way in ways]
    facts["logit_cap"] = found.cap
    if found.is_scaled or "learnt" in scales:
        facts["attention_scale"] = "learnt"
    elif all(isinstance(scale, float) for scale in scales):
        facts["attention_scale"] = slope * math.prod(s for s in scales if isinstance(s, float))
    facts["attention_positions"] = bias
    return facts


def _product(a: Attention) -> Op | None:
    """The matmul of queries and keys."""
    both = {a.query, a.key}
    users = [op for op in a.query.users if both <= set(matmul_operands(op) or ())]
    return users[0] if users else None


@dataclass(frozen=True)
class _Softmaxed:
    """The way from a product of queries and keys to the logits.

    Attributes:
        slope: the factor on a small product.
        cap: the soft cap, None without.
        is_scaled: whether a learnt factor is on the way.
        zero: the logits of a product of zeros.
        bias: kind of the biases that are added by position.
    """

    slope: float
    cap: float | None
    is_scaled: bool
    zero: Tensor
    bias: str | None


def _softmaxed(starts: Sequence[Value], ends: Sequence[Value], replay: Replay) -> _Softmaxed:
    (product,), part = starts, between(starts[0], ends[0])

    def logits(number: float) -> Tensor:
        given = torch.full(product.shape, number, dtype=torch.float64)
        return replay.run({product: given}, ends)[0]

    def first(number: float) -> float:
        """The logit of the first query and key; the diagonal is not masked."""
        return float(logits(number).reshape(-1)[0])

    rows = logits(0.0)
    zero = float(rows.reshape(-1)[0])
    slope = (first(_TINY) - first(-_TINY)) / (2 * _TINY)
    top, low = first(_HUGE) - zero, zero - first(-_HUGE)
    joined = {v for value in part if value.base == "cat" for v in value.inputs}
    others = [v for value in part for v in value.inputs if v not in {product, *part, *joined}]
    learnt = [v for v in others if v.learnt]
    is_scaled = any(v.numel <= product.shape[0] * 64 and _multiplies(v, part) for v in learnt)
    is_added = any(v.floating and v.numel > 1 for v in learnt)
    cap = (top + low) / 2 if 0 < top < 0.5 * _HUGE * slope else None
    bias = _bias_kind(rows[..., : product.shape[-1]], is_learnt=is_added)
    return _Softmaxed(slope, cap, is_scaled, rows, bias)


def _multiplies(value: Value, part: Iterable[Value]) -> bool:
    return any(v.base in {"mul", "div"} and value in v.inputs for v in part)


def _bias_kind(bias: Tensor, *, is_learnt: bool) -> str | None:
    """Positions that are added to the logits: "relative" (learnt), "alibi" (linear), "bias"; None without."""
    if bias.dim() < 2 or bias.shape[-1] < 3:
        return None
    if is_learnt:
        return "relative"
    rows = bias.reshape(-1, bias.shape[-2], bias.shape[-1])[:, -1]
    values = [row[row > _MASKED] for row in rows]
    if not any(bool((v - v[-1:]).abs().max() > 1e-9) for v in values if len(v)):
        return None
    is_linear = all(
        bool((v.diff(n=2).abs() < 1e-4 * v.diff().abs().max()).all()) for v in values if len(v) > 2
    )
    return "alibi" if is_linear else "bias"


def _scale(way: Way | None, replay: Replay) -> float | str | None:
    """The factor on the way to an operand, after the norms; None where unknown."""
    if way is None:
        return None
    if way.after is way.operand:
        return 1.0
    try:
        return replay.once(_factor, [way.after], [way.operand])
    except CannotReplay:
        return None


def _factor(starts: Sequence[Value], ends: Sequence[Value], replay: Replay) -> float | str:
    """The factor on a random tensor; rotations keep it."""
    (start,), part = starts, between(starts[0], ends[0])
    inside = {start, *part}
    for value in part:
        if value.base in {"mul", "div"} and any(v.is_weight for v in value.inputs if v not in inside):
            return "learnt"
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, start.shape, generator=generator).double() * 2 - 1
    zero, given = (replay.run({start: x}, ends)[0] for x in (torch.zeros_like(signs), signs))
    return float((given - zero).square().mean().sqrt())
