"""Recognise a norm by its computation: a native op, or a·s with s computed from a statistic of a.

A written-out norm is a product (or quotient). One factor, through casts, roots, ε and clamps, is a reduction
(mean, var, norm, …) of the other, through casts, squares and centring. A following γ, β or (1 + γ) is
absorbed where nothing else reads the values between, and so is a γ before the division. The statistic gives
the kind:

    (a − mean a) / √(var a + ε)   layernorm        a / √(mean a² + ε)   rmsnorm        a / ‖a‖   l2norm

and a / ‖a‖ times √d is an rmsnorm again. An rmsnorm whose gain depends on a, (γ + α·tanh(a·β)), is SeeDNorm,
and γ·tanh of an rmsnorm is BHyT. These names are for norms over all features of a token. With a
statistic over tokens (an instance norm, a norm over [T, d]) or over groups of features the kind is groupnorm;
with one over the batch, batchnorm.
"""

import math
from dataclasses import dataclass

from normscope.anatomy.axes import counted, reduced_axes
from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import op_set
from normscope.anatomy.statistic import (
    CENTRED,
    MEANS,
    Statistic,
    as_float,
    common,
    constant_of,
    find_statistic,
    same,
    uncentred,
    unsquared,
)

_BY_KEYWORD = 99
_NATIVE = {
    "native_layer_norm": ("layernorm", 2, 4),
    "layer_norm": ("layernorm", 2, 4),
    "_fused_rms_norm": ("rmsnorm", 2, 3),
    "rms_norm": ("rmsnorm", 2, 3),
    "native_batch_norm": ("batchnorm", 1, 7),
    "cudnn_batch_norm": ("batchnorm", 1, 7),
    "miopen_batch_norm": ("batchnorm", 1, _BY_KEYWORD),
    "batch_norm": ("batchnorm", 1, _BY_KEYWORD),
    "_native_batch_norm_legit": ("batchnorm", 1, _BY_KEYWORD),
    "_native_batch_norm_legit_no_training": ("batchnorm", 1, 6),
    "_batch_norm_with_update": ("batchnorm", 1, _BY_KEYWORD),
    "_batch_norm_no_update": ("batchnorm", 1, _BY_KEYWORD),
    "native_group_norm": ("groupnorm", 1, 7),
    "group_norm": ("groupnorm", 1, _BY_KEYWORD),
    "instance_norm": ("groupnorm", 1, _BY_KEYWORD),
}
"""Op → kind of norm, position of γ, position of ε."""
_SHARES = op_set("sigmoid hardsigmoid softmax _softmax")
_SQUASHES = {"tanh": "dyt", "erf": "derf"}


@dataclass(eq=False)
class FoundNorm:
    """A norm in the graph: from `input` to `output`, with its γ and β absorbed, and its defining op.

    `over` is the value and the axes of its statistic; None where the kind implies them.
    """

    kind: str
    input: Value
    output: Value
    core: Op
    eps: float | None
    weight: Value | None
    weight_offset: float = 0.0
    over: tuple[Value, list[int]] | None = None


def find_norms(ops: list[Op]) -> None:
    """Find every norm of the recording and write it onto the values where it starts and ends."""
    by_output: dict[Value, FoundNorm] = {}
    for op in ops:
        norm = _native(op) or _opaque(op) or _written_out(op)
        norm = norm or _bounded(op, by_output) or _squashed(op)
        if norm is not None:
            norm.kind = _kind_over(norm)
            by_output[norm.output] = _rescaled(norm)
    for norm in by_output.values():
        norm.output.norm = norm
        norm.input.norms_behind.append(norm)


def _kind_over(norm: FoundNorm) -> str:
    """The kind of a norm, given the axes of its statistic."""
    if norm.over is None:
        return norm.kind
    value, axes = norm.over
    over, others = counted(value, axes), counted(value, set(range(len(value.shape))) - set(axes))
    if "batch" in over:
        return "batchnorm"
    in_groups = "feature" in others and norm.kind != "l2norm"  # unit vectors a head: cosine attention
    return "groupnorm" if "token" in over or in_groups else norm.kind


def _native(op: Op) -> FoundNorm | None:
    if op.base not in _NATIVE or not op.outputs:
        return None
    kind, weight_at, eps_at = _NATIVE[op.base]
    weight = op.arg(weight_at, "weight")
    found = FoundNorm(kind, op.source, op.outputs[0], op, as_float(op.arg(eps_at, "eps")), None)
    if isinstance(weight, Value) and weight.learnt:
        found.weight, found.weight_offset = _gamma(weight)
    if kind in {"layernorm", "rmsnorm"}:
        found.over = op.source, list(range(len(op.source.shape)))[-len(op.args[1]) :]
    return _absorb(found)


def _opaque(op: Op) -> FoundNorm | None:
    if not op.outputs or op.outputs[0].looks_normed is None:
        return None
    weight = next((v for v in op.inputs[1:] if v.is_weight), None)
    return FoundNorm(op.outputs[0].looks_normed, op.source, op.outputs[0], op, None, weight)


def _written_out(op: Op) -> FoundNorm | None:
    if op.base not in {"mul", "div"} or len(op.inputs) != 2 or not op.outputs:
        return None
    orders = [op.inputs] if op.base == "div" else [op.inputs, op.inputs[::-1]]
    for carrier, scale in orders:
        if not carrier.live or not scale.live or same(carrier) is same(scale):
            continue
        statistic = find_statistic(scale)
        if statistic is None or statistic.op.outputs[0].numel >= carrier.numel:
            continue
        reduced, squared_centred = uncentred(unsquared(statistic.reduced))
        raw, centred = uncentred(carrier)
        source, weight, offset = common(raw, reduced), None, 0.0
        if source is None and (split := _without_gamma(carrier)) is not None:
            raw, centred = uncentred(split[0])
            source, (weight, offset) = common(raw, reduced), _gamma(split[1])
        if source is None:
            continue
        kind = _kind(statistic, centred, squared_centred)
        over = statistic.reduced, reduced_axes(statistic.op)
        found = _absorb(FoundNorm(kind, source, op.outputs[0], op, statistic.eps, weight, offset, over))
        root = carrier.shape[-1] ** 0.5
        if found.kind == "l2norm" and math.isclose(_gain(found, statistic), root, rel_tol=1e-3):
            found.kind = "rmsnorm"
        return found
    return None


def _squashed(op: Op) -> FoundNorm | None:
    """DyT, γ·tanh(a·x) + β, and Derf, γ·erf(a·x + s) + β, with a learnt number a and a γ for each feature."""
    kind = _SQUASHES.get(op.base)
    if kind is None or not op.outputs or not op.outputs[0].live:
        return None
    value = same(op.source)
    if value.base == "add" and any(v.is_weight for v in value.inputs):
        value = same(next(v for v in value.inputs if not v.is_weight))
    scales = [v for v in value.inputs if v.is_weight] if value.base == "mul" else []
    if len(scales) != 1 or scales[0].numel != 1:
        return None
    source = next(v for v in value.inputs if v is not scales[0])
    found = _absorb(FoundNorm(kind, source, op.outputs[0], op, None, None))
    return found if found.weight is not None and found.weight.shape[-1:] == source.shape[-1:] else None


def _bounded(op: Op, by_output: dict[Value, FoundNorm]) -> FoundNorm | None:
    """BHyT, γ·tanh(c·n) with n an rmsnorm, which is then no norm of its own."""
    if op.base != "tanh" or not op.outputs or not op.outputs[0].live:
        return None
    inner, value = None, same(op.source)
    while inner is None:
        inner = next((n for n in by_output.values() if value in (n.output, n.core.outputs[0])), None)
        live = [v for v in value.inputs if v.live]
        if inner is None and (value.base not in {"mul", "div"} or len(live) != 1):
            return None
        value = same(live[0]) if live else value
    found = _absorb(FoundNorm("bhyt", inner.input, op.outputs[0], op, inner.eps, None, over=inner.over))
    if inner.kind != "rmsnorm" or found.weight is None or found.weight.shape[-1:] != found.input.shape[-1:]:
        return None
    del by_output[inner.output]
    return found


def _rescaled(norm: FoundNorm) -> FoundNorm:
    """SeeDNorm where the only reader multiplies by γ + α·tanh(a·β), else `norm` itself."""
    users = [op for op in norm.output.users if op.outputs]
    if norm.kind != "rmsnorm" or norm.weight is not None or len(users) != 1 or users[0].base != "mul":
        return norm
    gain = next((same(v) for v in users[0].inputs if v is not norm.output), None)
    if gain is None or gain.base != "add" or len(gain.inputs) != 2:
        return norm
    weight = next((v for v in gain.inputs if same(v).is_weight), None)
    amount = next((same(v) for v in gain.inputs if v is not weight), None)
    if weight is None or amount is None or amount.base != "mul":
        return norm
    if not any(same(v).base == "tanh" and same(v).numel < norm.output.numel for v in amount.inputs):
        return norm
    norm.kind, norm.output, norm.weight = "seednorm", users[0].outputs[0], same(weight)
    return _absorb(norm)


def _without_gamma(carrier: Value) -> tuple[Value, Value] | None:
    """x − μ and γ of γ·(x − μ), where γ is written in front of the division; None for anything else."""
    product = same(carrier)
    if product.base != "mul" or len(product.inputs) != 2:
        return None
    a, b = product.inputs
    if a.is_weight == b.is_weight:
        return None
    return (b, a) if a.is_weight else (a, b)


def _kind(statistic: Statistic, centred: bool, squared_centred: bool) -> str:
    if centred and (squared_centred or statistic.op.base in CENTRED):
        return "layernorm"
    if statistic.op.base in MEANS:
        return "rmsnorm"
    return "l2norm"


def _gain(norm: FoundNorm, statistic: Statistic) -> float:
    """The constant in a·c/‖a‖, from factors on the norm and directly after it."""
    gain = 1 / statistic.gain if norm.core.base == "div" else statistic.gain
    value = norm.output
    while value is not norm.core.outputs[0]:
        op = value.op
        assert op is not None
        number = constant_of(op)
        if number is not None and op.base in {"mul", "div"}:
            gain *= number if op.base == "mul" else 1 / number
        value = next(v for v in op.inputs if v.live)
    return gain


def _absorb(norm: FoundNorm) -> FoundNorm:
    """Absorb the casts, γ and β that follow the norm."""
    while True:
        users = [op for op in norm.output.users if op.outputs]
        if len(users) != 1:
            return norm
        op, others = users[0], [v for v in users[0].inputs if v is not norm.output]
        if op.outputs[0].shape != norm.output.shape:
            return norm
        learnt = others[0] if len(others) == 1 and others[0].is_weight else None
        if learnt is not None and same(learnt).base in _SHARES:
            return norm  # the share of a learnt gate, not a γ
        if op.base == "mul" and learnt is not None and norm.weight is None:
            norm.weight, norm.weight_offset = _gamma(learnt)
        elif not (
            op.base in {"_to_copy", "to"}
            or (op.base == "add" and learnt is not None and _is_vector(learnt, norm.output))
            or (norm.kind == "l2norm" and op.base in {"mul", "div"} and not others and constant_of(op))
        ):
            return norm
        norm.output = op.outputs[0]


def _is_vector(beta: Value, like: Value) -> bool:
    """True for a β, with one entry per feature; a position embedding has entries per token."""
    return beta.numel in {1, like.shape[-1]}


def _gamma(weight: Value) -> tuple[Value, float]:
    """γ, and 1.0 where the factor is 1 + γ."""
    weight = same(weight)
    if weight.op is not None and weight.base == "add" and constant_of(weight.op) == 1.0:
        return same(next(v for v in weight.inputs if v.learnt)), 1.0
    return weight, 0.0
