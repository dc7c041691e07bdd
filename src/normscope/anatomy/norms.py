"""Recognise a norm by its computation: a native op, or a product of a tensor and a factor of its own.

A norm that is written out is found by what it computes (`written`, `scaling`), in any spelling. A following
γ, β or (1 + γ) is absorbed where nothing else reads the values between, and so is a γ before the division:

    G·(a − mean a)/√(var a + ε)   layernorm        a/√(mean a² + ε)   rmsnorm        a/‖a‖   l2norm

The factor G decides between the last two: a/‖a‖ times √d is an rmsnorm. An rmsnorm whose gain depends on a,
(γ + α·tanh(a·β)), is SeeDNorm, and γ·tanh of an rmsnorm is BHyT. These names are for norms over all features
of a token. With a statistic over tokens (an instance norm, a norm over [T, d]) or over groups of features the
kind is groupnorm; with one over the batch, batchnorm.
"""

import math
from dataclasses import dataclass, replace

from normscope.anatomy.axes import counted
from normscope.anatomy.graph import Op, Value, narrows
from normscope.anatomy.ops import VIEWS, constant_of, op_set, same
from normscope.anatomy.scaling import Scaling
from normscope.anatomy.written import OwnFactor, OwnFactors, Part

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
_VECTOR_NORMS = op_set("linalg_vector_norm norm")
_SQUASHES = {"tanh": "dyt", "erf": "derf"}


@dataclass(eq=False)
class FoundNorm:
    """A norm in the graph: from `input` to `output`, with its γ and β absorbed, and its defining op.

    `over` is the value and the axes of its statistic; None where the kind implies them. `bias` is a β that is
    added inside of it. `inside` are the values from its input to the output of its defining op, where it is
    written out.
    """

    kind: str
    input: Value
    output: Value
    core: Op
    eps: float | None
    weight: Value | None
    weight_offset: float = 0.0
    over: tuple[Value, list[int]] | None = None
    bias: Value | None = None
    inside: frozenset[Value] = frozenset()


def find_norms(ops: list[Op]) -> list[OwnFactor]:
    """Find every norm of the recording and write it onto the values where it starts and ends.

    Returns the products of a tensor with a factor of its own that are no norms.
    """
    by_output: dict[Value, FoundNorm] = {}
    cores: set[Value] = set()
    factors = OwnFactors(narrows(ops))
    for op in ops:
        norm = _native(op) or _opaque(op) or _written_out(op, factors, cores)
        norm = norm or _bounded(op, by_output) or _squashed(op)
        if norm is not None:
            norm.kind = _kind_over(norm)
            cores.add(op.outputs[0])
            by_output[norm.output] = _rescaled(norm)
    for norm in by_output.values():
        norm.output.norm = norm
        norm.input.norms_behind.append(norm)
    return list(factors.others.values())


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
    found = FoundNorm(kind, op.source, op.outputs[0], op, _as_float(op.arg(eps_at, "eps")), None)
    if isinstance(weight, Value) and weight.learnt:
        found.weight, found.weight_offset = _gamma(weight)
    if kind in {"layernorm", "rmsnorm"}:
        found.over = op.source, list(range(len(op.source.shape)))[-len(op.args[1]) :]
    elif _is_over_features(op):
        found.kind = "layernorm"
    return _absorb(found)


def _is_over_features(op: Op) -> bool:
    """True for a batch or group norm whose statistic is over all features of each token."""
    is_group = op.base == "native_group_norm" and op.args[6] == 1
    if not is_group and not (op.base == "native_batch_norm" and op.args[5]):
        return False
    axes = set(range(len(op.source.shape))) - {0 if is_group else 1}
    over, others = counted(op.source, axes), counted(op.source, {0 if is_group else 1})
    # An image of one pixel has no tokens: its group norm is over the pixels all the same.
    return over == {"feature"} and "token" in others and "feature" not in others


def _opaque(op: Op) -> FoundNorm | None:
    if not op.outputs or op.outputs[0].looks_normed is None:
        return None
    weight = next((v for v in op.inputs[1:] if v.is_weight), None)
    return FoundNorm(op.outputs[0].looks_normed, op.source, op.outputs[0], op, None, weight)


def _written_out(op: Op, factors: OwnFactors, cores: set[Value]) -> FoundNorm | None:
    found = factors.norm_at(op, cores)
    if found is None:
        return None
    part, scaling = found
    norm = FoundNorm(
        _kind(part, scaling), part.start, part.end, op, scaling.eps, None, over=(part.end, list(scaling.axes))
    )
    norm.inside = part.values
    if part.gains:
        norm.weight, norm.weight_offset = _gamma(max(part.gains, key=lambda v: v.numel))
    norm.bias = max(part.shifts, key=lambda v: v.numel, default=None)
    _absorb(norm)
    if norm.kind == "l2norm" and math.isclose(_gain(norm, scaling), 1.0, rel_tol=1e-3):
        norm.kind = "rmsnorm"
    if norm.eps is not None:
        norm.eps *= _eps_factor(norm, scaling)
    return norm


def _kind(part: Part, scaling: Scaling) -> str:
    """The kind by the root mean square G of the result: 1 for an rmsnorm, 1/√d for a unit vector.

    With another constant in it, a norm is the kind that it is computed from.
    """
    if scaling.centred:
        return "layernorm"
    if any(math.isclose(abs(scaling.gain), g, rel_tol=1e-3) for g in (1.0, scaling.count**-0.5)):
        return "rmsnorm" if math.isclose(abs(scaling.gain), 1.0, rel_tol=1e-3) else "l2norm"
    return "l2norm" if any(v.base in _VECTOR_NORMS for v in part.values) else "rmsnorm"


def _eps_factor(norm: FoundNorm, scaling: Scaling) -> float:
    """Factor of the ε beside the mean square that gives the ε beside the sum, or the unbiased variance."""
    if norm.kind == "l2norm":
        return float(scaling.count)
    is_unbiased = scaling.centred and math.isclose(scaling.gain**2, 1 - 1 / scaling.count, rel_tol=1e-5)
    return 1 / scaling.gain**2 if is_unbiased else 1.0


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


def _gain(norm: FoundNorm, scaling: Scaling) -> float:
    """G with the constant factors directly after the norm."""
    gain, value = abs(scaling.gain), norm.output
    while value is not norm.core.outputs[0]:
        op = value.op
        assert op is not None
        number = constant_of(op)
        if number is not None and op.base in {"mul", "div"}:
            gain *= number if op.base == "mul" else 1 / number
        value = next(v for v in op.inputs if v.live)
    return gain


def _absorb(norm: FoundNorm) -> FoundNorm:
    """Absorb the casts, γ and β that follow the norm, and views where a γ for each feature is behind them."""
    _absorb_next(norm)
    view = norm.output
    while norm.weight is None:
        users = [op for op in view.users if op.outputs]
        if len(users) != 1 or users[0].base not in VIEWS:
            break
        view = users[0].outputs[0]
        trial = _absorb_next(replace(norm, output=view))
        if trial.weight is not None and trial.weight.numel == view.shape[-1]:
            norm.output, norm.weight, norm.weight_offset = trial.output, trial.weight, trial.weight_offset
    return norm


def _absorb_next(norm: FoundNorm) -> FoundNorm:
    """Absorb what follows the norm in the same shape."""
    while True:
        users = [op for op in norm.output.users if op.outputs]
        if norm.weight is None and (offset := _offset_apart(norm.output, users)) is not None:
            norm.weight, norm.weight_offset, norm.output = *offset, users[1].outputs[0]
            continue
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


def _offset_apart(normed: Value, users: list[Op]) -> tuple[Value, float] | None:
    """γ and 1.0 of the readers n·γ and n + n·γ of a norm n; None for others."""
    if len(users) != 2 or users[0].base != "mul" or users[1].base != "add":
        return None
    product, weights = users[0].outputs[0], [v for v in users[0].inputs if v.is_weight]
    is_sum = set(users[1].inputs) == {normed, product} and users[1].kwargs.get("alpha", 1) == 1
    if len(weights) != 1 or not is_sum or len(product.users) != 1:
        return None
    weight, offset = _gamma(weights[0])
    return (weight, 1.0) if offset == 0 and product.shape == normed.shape else None


def _as_float(x: object) -> float | None:
    """A Python number as a float; None for anything else."""
    return float(x) if isinstance(x, int | float) else None


def _is_vector(beta: Value, like: Value) -> bool:
    """True for a β, with one entry per feature; a position embedding has entries per token."""
    return beta.numel in {1, like.shape[-1]}


def _gamma(weight: Value) -> tuple[Value, float]:
    """γ, and 1.0 where the factor is 1 + γ."""
    weight = same(weight)
    if weight.op is not None and weight.base == "add" and constant_of(weight.op) == 1.0:
        return same(next(v for v in weight.inputs if v.learnt)), 1.0
    return weight, 0.0
