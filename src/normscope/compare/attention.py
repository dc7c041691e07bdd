"""Facts of an attention, from the dataflow and from what its parts compute."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy.attention import Attention
from normscope.anatomy.axes import counted
from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value, between
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import matmul_operands, weight_of
from normscope.anatomy.replay import CannotReplay, Replay, cuts

Facts = dict[str, Any]
_MASKED = -1e4
"""Logits below this are masked out: implementations write −inf, the smallest float, −1e9 or −1e4."""
_TINY, _HUGE = 1e-3, 1e6


def attention_facts(
    branch: FoundBranch,
    roles: dict[Op, tuple[str, ...]],
    modules: Mapping[str, nn.Module],
    replay: Replay,
) -> Facts:
    """Facts of the attentions of a branch; what cannot be read is left out."""
    attentions = branch.attentions
    if not attentions:
        return {}
    first = attentions[0]
    facts: Facts = _heads(attentions, branch, roles)
    facts["causal"] = first.probabilities.causal if branch.kind == "attention" else None
    if facts["causal"] is None:
        del facts["causal"]
    facts |= _window(first, branch, modules)
    ways = [_way(operand, branch) for operand in (first.query, first.key)]
    facts |= _qk_norm([way for way in ways if way is not None], first)
    facts["value_norm"] = bool(_norms_before(first.value, branch))
    facts |= _logits(first, ways, replay)
    facts |= _positions(ways[0], replay, facts)
    facts.pop("bias_positions", None)
    return facts


def _heads(attentions: list[Attention], branch: FoundBranch, roles: dict[Op, tuple[str, ...]]) -> Facts:
    first = attentions[0]
    width, value_width = first.query.shape[-1], first.value.shape[-1]
    heads = sum(_features(a.query) for a in attentions)
    made: dict[tuple[str, ...], int] = {}
    for op in branch.mixers:
        if roles.get(op):
            made[roles[op]] = made.get(roles[op], 0) + op.outputs[0].shape[-1]
    if ("q",) in made and made["q",] % width == 0:
        heads = made["q",] // width
    kv_heads = None
    if ("k",) in made and made["k",] % width == 0:
        kv_heads = made["k",] // width
    elif ("k", "v") in made and made["k", "v"] % (width + value_width) == 0:
        kv_heads = made["k", "v"] // (width + value_width)
    elif ("q", "k", "v") in made:
        rest = made["q", "k", "v"] - heads * width
        kv_heads = rest // (width + value_width) if rest > 0 and rest % (width + value_width) == 0 else None
    facts: Facts = {"heads": heads, "head_width": width, "value_width": value_width}
    return facts | ({"kv_heads": kv_heads} if kv_heads else {})


def _features(value: Value) -> int:
    """Entries of the axes before the last that count features: the heads."""
    axes = range(len(value.shape) - 1)
    sizes = [n for i in axes for what, n in value.axes[i] if what == "feature"]
    return math.prod(sizes)


def _window(a: Attention, branch: FoundBranch, modules: Mapping[str, nn.Module]) -> Facts:
    """The tokens that a query sees; a window longer than the batch is read from the module that runs it."""
    reach, size = a.probabilities.reach, a.probabilities.shape[-1]
    if reach is None or branch.kind != "attention":
        return {}
    back, ahead = reach
    own: Facts = {"own_key": ahead >= 0}
    causal = a.probabilities.causal
    if back >= size - 1 and (causal or ahead < 0 or ahead >= size - 1):
        op = a.probabilities.op
        module = modules.get(op.call.path) if op is not None else None
        given = vars(module).items() if module is not None else ()
        longer = [v for name, v in given if "window" in name and type(v) is int and v >= size]
        return own | {"window": longer[0] if longer else None}
    return own | {"window": back + 1 if causal else back + ahead + 1}


class _Way:
    """The way from a projection to an operand of an attention, with the norms on it."""

    def __init__(self, start: Value, norms: list[FoundNorm], operand: Value, width: int) -> None:
        self.start, self.norms, self.operand, self.width = start, norms, operand, width

    @property
    def after(self) -> Value:
        """Place at which the way goes on after its last norm."""
        return self.norms[-1].output if self.norms else self.start


def _way(operand: Value, branch: FoundBranch) -> _Way | None:
    from normscope.compare.activation import biased

    made = _projection_behind(operand)
    if made is None:
        return None
    start = biased(made)
    inside = set(between(start, operand))
    if not inside and start is not operand:
        start = made.outputs[0]
        inside = set(between(start, operand))
    norms = [v.norm for v in sorted(inside, key=lambda v: v.index) if v.norm is not None]
    norms = [norm for norm in norms if norm.input in inside or norm.input is start]
    return _Way(start, norms, operand, made.outputs[0].shape[-1])


def _projection_behind(operand: Value) -> Op | None:
    """The parameterised matmul nearest behind an operand."""
    stack, seen, found = [operand], set[Value](), list[Op]()
    while stack:
        value = stack.pop()
        if value in seen or value.op is None or not value.live:
            continue
        seen.add(value)
        if weight_of(value.op) is not None:
            found.append(value.op)
        else:
            stack.extend(value.inputs)
    return max(found, key=lambda op: op.outputs[0].index, default=None)


def _norms_before(operand: Value, branch: FoundBranch) -> list[FoundNorm]:
    way = _way(operand, branch)
    return way.norms if way is not None else []


def _qk_norm(ways: list[_Way], a: Attention) -> Facts:
    if not ways:
        return {}
    if not all(way.norms for way in ways):
        return {"qk_norm": None}
    norms = [way.norms[-1] for way in ways]
    if any(norm.kind == "l2norm" for norm in norms):
        return {"qk_norm": "cosine"}
    is_full = [way.norms[-1].input.shape[-1] == way.width != a.query.shape[-1] for way in ways]
    kinds = sorted({norm.kind for norm in norms})
    eps = sorted({norm.eps for norm in norms if norm.eps is not None})
    offsets = sorted({norm.weight_offset for norm in norms})
    return {
        "qk_norm": "full" if any(is_full) else "head",
        "qk_norm_kind": kinds[0] if len(kinds) == 1 else kinds,
        "qk_norm_eps": eps[0] if len(eps) == 1 else eps,
        "qk_norm_gain": all(norm.weight is not None for norm in norms),
        "qk_norm_offset": offsets[0] if len(offsets) == 1 else offsets,
    }


def _product(a: Attention) -> Op | None:
    """The matmul of queries and keys."""
    both = {a.query, a.key}
    users = [op for op in a.query.users if both <= set(matmul_operands(op) or ())]
    return users[0] if users else None


def _logits(a: Attention, ways: list[_Way | None], replay: Replay) -> Facts:
    """Scale, soft cap, biases by position and sinks, from the numbers between the product and the softmax."""
    op = _product(a)
    if op is None or not op.outputs:
        return {}
    product = op.outputs[0]
    part = between(product, a.logits)
    if not part and product is not a.logits:
        return {}
    joined = {v for value in part if value.base == "cat" for v in value.inputs}
    others = [v for value in part for v in value.inputs if v not in {product, *part, *joined}]
    facts: Facts = {"sinks": any(v.is_weight and value.base == "cat" for value in part for v in value.inputs)}
    added = [v for v in others if v.floating and v.learnt and v.numel > 1]
    try:
        zero = _diagonal(replay, a, product, 0.0)
        slope = (_diagonal(replay, a, product, _TINY) - _diagonal(replay, a, product, -_TINY)) / (2 * _TINY)
        top = _diagonal(replay, a, product, _HUGE) - zero
        low = zero - _diagonal(replay, a, product, -_HUGE)
        (bias,) = replay.run({product: torch.zeros(product.shape, dtype=torch.float64)}, [a.logits])
        if op.base == "baddbmm":  # BLOOM: the matmul itself adds the bias
            slope = slope * op.kwargs.get("alpha", 1)
            bias = replay.fixed(op.inputs[0]).expand(product.shape) + bias.reshape(product.shape)
            added = [op.inputs[0]]
    except CannotReplay:
        return facts
    is_learnt = any(v.learnt for v in others if v.numel <= product.shape[0] * 64 and _multiplies(v, part))
    scales = [_scale(way, replay) for way in ways]
    capped = bool(top < 0.5 * _HUGE * slope) and bool(top > 0)
    facts["logit_cap"] = float((top + low) / 2) if capped else None
    if is_learnt or "learnt" in scales:
        facts["attention_scale"] = "learnt"
    elif all(isinstance(scale, float) for scale in scales):
        facts["attention_scale"] = float(slope) * math.prod(s for s in scales if isinstance(s, float))
    facts["bias_positions"] = _bias_kind(bias[..., : product.shape[-1]], added)
    return facts


def _multiplies(value: Value, part: list[Value]) -> bool:
    return any(v.base in {"mul", "div"} and value in v.inputs for v in part)


def _diagonal(replay: Replay, a: Attention, product: Value, number: float) -> Tensor:
    """The logit of the first query and key for this product; the diagonal is not masked."""
    given = torch.full(product.shape, number, dtype=torch.float64)
    (logits,) = replay.run({product: given}, [a.logits])
    return logits.reshape(-1)[0]


def _bias_kind(bias: Tensor, added: list[Value]) -> str | None:
    """Positions that are added to the logits: "relative" (learnt), "alibi" (linear), "bias"; None without."""
    if bias.dim() < 2 or bias.shape[-1] < 3:
        return None
    if any(v.learnt for v in added):
        return "relative"
    rows = bias.reshape(-1, bias.shape[-2], bias.shape[-1])
    row = rows[:, -1]
    open_ = row > _MASKED
    values = [r[o] for r, o in zip(row, open_, strict=True)]
    if not any(bool((v - v[-1:]).abs().max() > 1e-9) for v in values if len(v)):
        return None
    is_linear = all(
        bool((v.diff(n=2).abs() < 1e-4 * v.diff().abs().max()).all()) for v in values if len(v) > 2
    )
    return "alibi" if is_linear else "bias"


def _scale(way: _Way | None, replay: Replay) -> float | str | None:
    """The factor on a random tensor on the way to its operand; rotations keep it. None where unknown."""
    if way is None:
        return None
    start = way.after
    if start is way.operand:
        return 1.0
    part = between(start, way.operand)
    inside = {start, *part}
    for value in part:
        if value.base in {"mul", "div"} and any(v.is_weight for v in value.inputs if v not in inside):
            return "learnt"
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, start.shape, generator=generator).double() * 2 - 1
    try:
        zero, given = (replay.run({start: x}, [way.operand])[0] for x in (torch.zeros_like(signs), signs))
    except CannotReplay:
        return None
    return float((given - zero).square().mean().sqrt())


def _positions(way: _Way | None, replay: Replay, known: Facts) -> Facts:
    """Positions inside of the attention: rotary with layout and base, or a bias on the logits."""
    try:
        turned = _turn(way, replay) if way is not None else None
    except CannotReplay:
        return {}
    if turned is None:
        return {"attention_positions": known["bias_positions"]} if "bias_positions" in known else {}
    bias = known.get("bias_positions")
    kind = "rotary" if bias is None else f"rotary and {bias}"
    return {"attention_positions": kind, **_rotary(*turned)}


def _turn(way: _Way, replay: Replay) -> tuple[Tensor, Tensor] | None:
    """One vector at every position, before and after the way to the operand: (K,), (T, K).

    None where the way does the same at every position.
    """
    for start, end in _segments(way):
        width = way.operand.shape[-1]
        heads = [v for v in cuts(start, end) if len(v.shape) > 2 and v.shape[-1] == width]
        if not heads or not between(heads[0], end):
            continue
        signs = torch.tensor([1.0, -1.3, 1.1]).repeat(width // 3 + 1)[:width].double()
        x = torch.linspace(1.0, 2.0, width, dtype=torch.float64) * signs
        given = x.expand(heads[0].shape).clone()
        (y,) = replay.run({heads[0]: given}, [end])
        (zero,) = replay.run({heads[0]: torch.zeros_like(given)}, [end])
        rows = _by_token(y - zero, end)
        if rows is not None and bool((rows - rows[:1]).abs().max() > 1e-9):
            return x, rows
    return None


def _segments(way: _Way) -> list[tuple[Value, Value]]:
    points = [way.start]
    for norm in way.norms:
        points += [norm.input, norm.output]
    points.append(way.operand)
    return list(zip(points[::2], points[1::2], strict=True))


def _by_token(y: Tensor, end: Value) -> Tensor | None:
    """(T, K) of one sequence and one head."""
    tokens = [i for i in range(len(end.shape) - 1) if counted(end, [i]) == {"token"}]
    axis = tokens[-1] if tokens else len(end.shape) - 2
    if axis < 0:
        return None
    return y.movedim(axis, -2).reshape(-1, y.shape[axis], y.shape[-1])[0]


def _rotary(x: Tensor, y: Tensor) -> Facts:
    """Layout, width, base and scaling of a rotation of pairs of features by angles linear in the position.

    The layout is that of the pairs in `x`. Their order in `y` does not matter, as queries and keys share it.
    """
    turning = [int(i) for i in ((y - y[:1]).abs().max(0).values > 1e-9).nonzero()[:, 0]]
    number = len(turning)
    facts: Facts = {"rotary_width": number}
    if number % 2:
        return facts
    for after in _layouts(turning).values():
        z = torch.complex(y[:, after[0]], y[:, after[1]])
        if bool(((z.abs() - z[:1].abs()).abs() > 1e-5 * z[:1].abs()).any()):
            continue
        facts |= _base(z, number)
        for features in (turning, list(range(number)), list(range(len(x) - number, len(x)))):
            for name, before in _layouts(features).items():
                ratio = z[0].abs() / torch.hypot(x[before[0]], x[before[1]])
                if bool((ratio - ratio[0]).abs().max() < 1e-4 * ratio[0]):
                    return facts | {"rotary_layout": name}
    return facts


def _layouts(features: list[int]) -> dict[str, tuple[list[int], list[int]]]:
    """The first and the second features of all pairs, by layout."""
    half = len(features) // 2
    return {
        "halves": (features[:half], features[half:]),
        "neighbours": (features[0::2], features[1::2]),
    }


def _base(z: Tensor, number: int) -> Facts:
    """Base and scaling from the angles per position: base^(−2i/number), else a list of them."""
    angles = (z[1:] / z[:-1]).angle().median(0).values.abs()
    index = torch.arange(len(angles), dtype=torch.float64)
    if len(angles) < 2 or not bool((angles > 0).all()):
        return {}
    log = angles.log()
    slope = (log[-1] - log[0]) / index[-1]
    is_geometric = bool((log - log[0] - slope * index).abs().max() < 1e-4 * (1 + log.abs().max()))
    base = math.exp(-float(slope) * number / 2)
    if is_geometric and abs(float(angles[0]) - 1) < 1e-4:
        return {"rotary_base": _rounded(base), "rotary_scaling": None}
    if is_geometric:
        return {"rotary_base": _rounded(base), "rotary_scaling": f"1/{_rounded(1 / float(angles[0])):g}"}
    some = angles[:: max(1, len(angles) // 4)]
    words = ", ".join(f"{float(angle):.3g}" for angle in some)
    return {"rotary_scaling": f"angles per position {words}"}


def _rounded(number: float) -> float:
    """Six digits: the base comes from angles in float32 in some models."""
    return float(f"{number:.4g}")
