"""Recognise a norm by what it computes: a native op, or a·s with s made of a statistic of a.

A written-out norm is a product (or quotient) whose one factor, seen through casts, roots, ε and clamps, is a
reduction (mean, var, norm, …) of the other, seen through casts, squares and centring. γ, β and (1 + γ) behind
it are absorbed as long as nothing else reads what lies between. Which statistic it is gives the kind:

    (a − mean a) / √(var a + ε)   layernorm        a / √(mean a² + ε)   rmsnorm        a / ‖a‖   l2norm

and a / ‖a‖ times √d is an rmsnorm again.
"""

import math
from dataclasses import dataclass

from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import CASTS, DROPOUTS, VIEWS, is_weight

_NATIVE = {
    "native_layer_norm": "layernorm",
    "layer_norm": "layernorm",
    "_fused_rms_norm": "rmsnorm",
    "rms_norm": "rmsnorm",
    "native_batch_norm": "batchnorm",
    "cudnn_batch_norm": "batchnorm",
    "miopen_batch_norm": "batchnorm",
    "batch_norm": "batchnorm",
    "_native_batch_norm_legit": "batchnorm",
    "_native_batch_norm_legit_no_training": "batchnorm",
    "_batch_norm_with_update": "batchnorm",
    "_batch_norm_no_update": "batchnorm",
    "native_group_norm": "groupnorm",
    "group_norm": "groupnorm",
    "instance_norm": "groupnorm",
}
_EPS_AT = {
    "native_layer_norm": 4,
    "_fused_rms_norm": 3,
    "rms_norm": 3,
    "native_group_norm": 7,
    "layer_norm": 4,
}
_EPS_AT |= {"native_batch_norm": 7, "cudnn_batch_norm": 7, "_native_batch_norm_legit_no_training": 6}
_WEIGHT_AT = {"native_layer_norm": 2, "_fused_rms_norm": 2, "rms_norm": 2, "layer_norm": 2}
_MEANS = frozenset({"mean", "var", "std", "var_mean", "std_mean"})
_SUMS = frozenset({"sum", "linalg_vector_norm", "norm", "_weight_norm_interface"})
_CENTRED = frozenset({"var", "std", "var_mean", "std_mean"})
_ROOTS = frozenset({"rsqrt", "sqrt", "reciprocal", "pow", "clamp", "clamp_min", "maximum", "where", "abs"})
_POWERS = {"rsqrt": -0.5, "sqrt": 0.5, "reciprocal": -1.0}
_SEEN_THROUGH = CASTS | VIEWS | DROPOUTS


@dataclass(eq=False)
class FoundNorm:
    """A norm in the graph: from `input` to `output`, its γ and β absorbed, and the op that makes it one."""

    kind: str
    input: Value
    output: Value
    core: Op
    eps: float | None
    weight: Value | None
    weight_offset: float = 0.0


@dataclass
class _Statistic:
    """What a scale factor is made of: gain · (reduction + ε)^power."""

    reduced: Value
    op: Op
    eps: float | None
    gain: float


def find_norms(ops: list[Op]) -> dict[Value, FoundNorm]:
    """Every norm of the recording, by its output."""
    norms: dict[Value, FoundNorm] = {}
    for op in ops:
        norm = _native(op) or _opaque(op) or _written_out(op)
        if norm is not None:
            norms[norm.output] = norm
    return norms


def _native(op: Op) -> FoundNorm | None:
    kind = _NATIVE.get(op.base)
    if kind is None or not op.outputs:
        return None
    eps = op.arg(_EPS_AT.get(op.base, 99), "eps")
    weight = op.arg(_WEIGHT_AT.get(op.base, 1), "weight")
    found = FoundNorm(kind, op.inputs[0], op.outputs[0], op, _float(eps), None)
    if isinstance(weight, Value) and weight.learnt:
        found.weight = weight
    return _absorb(found)


def _opaque(op: Op) -> FoundNorm | None:
    if not op.outputs or op.outputs[0].norm is None:
        return None
    weights = [v for v in op.inputs[1:] if is_weight(v)]
    weight = weights[0] if weights else None
    return FoundNorm(op.outputs[0].norm, op.inputs[0], op.outputs[0], op, None, weight)


def _written_out(op: Op) -> FoundNorm | None:
    if op.base not in {"mul", "div"} or len(op.inputs) != 2 or not op.outputs:
        return None
    orders = [op.inputs] if op.base == "div" else [op.inputs, op.inputs[::-1]]
    for carrier, scale in orders:
        if not carrier.live or not scale.live or _same(carrier) is _same(scale):
            continue
        statistic = _statistic(scale)
        if statistic is None or math.prod(statistic.op.outputs[0].shape) >= math.prod(carrier.shape):
            continue
        raw, centred = _uncentred(carrier)
        reduced, squared_centred = _uncentred(_unsquared(statistic.reduced))
        source = _common(raw, reduced)
        if source is None:
            continue
        found = FoundNorm(
            _kind(statistic, centred, squared_centred), source, op.outputs[0], op, statistic.eps, None
        )
        found = _absorb(found)
        if found.kind == "l2norm" and math.isclose(
            _gain(found, statistic), carrier.shape[-1] ** 0.5, rel_tol=1e-3
        ):
            found.kind = "rmsnorm"
        return found
    return None


def _kind(statistic: _Statistic, centred: bool, squared_centred: bool) -> str:
    if centred and (squared_centred or statistic.op.base in _CENTRED):
        return "layernorm"
    if statistic.op.base in _MEANS:
        return "rmsnorm"
    return "l2norm"


def _statistic(scale: Value) -> _Statistic | None:
    """The reduction a scale is made of, through roots, ε, clamps and constant factors; None without one."""
    eps, gain, power, rooted = None, 1.0, 1.0, False
    for _ in range(12):
        op = scale.op
        if op is None:
            return None
        if op.base in _MEANS | _SUMS:
            rooted = rooted or op.base in {"linalg_vector_norm", "norm", "std", "std_mean"}
            if not rooted or (op.base == "linalg_vector_norm" and op.arg(1, "ord", 2) != 2):
                return None
            return _Statistic(op.inputs[0], op, eps, gain)
        if op.base in _SEEN_THROUGH:
            scale = op.inputs[0]
        elif op.base in _ROOTS:
            step = _POWERS.get(op.base, _exponent(op) if op.base == "pow" else 1.0)
            power, rooted = power * step, rooted or abs(step) == 0.5
            if op.base in {"clamp", "clamp_min"}:
                eps = _float(op.arg(1, "min"))
            scale = next((v for v in op.inputs if v.live), op.inputs[0])
        elif op.base in {"add", "mul", "div"}:
            live = [v for v in op.inputs if v.live]
            if len(live) != 1:
                return None
            number = _constant(op)
            if op.base == "add":
                eps = number
            elif number is not None and number > 0:
                gain *= number**power if op.base == "mul" else number**-power
            scale = live[0]
        else:
            return None
    return None


def _gain(norm: FoundNorm, statistic: _Statistic) -> float:
    """The constant in a·c/‖a‖, from factors on the norm and right behind it."""
    gain = 1 / statistic.gain if norm.core.base == "div" else statistic.gain
    value = norm.output
    while value is not norm.core.outputs[0]:
        op = value.op
        assert op is not None
        number = _constant(op)
        if number is not None and op.base in {"mul", "div"}:
            gain *= number if op.base == "mul" else 1 / number
        value = next(v for v in op.inputs if v.live)
    return gain


def _absorb(norm: FoundNorm) -> FoundNorm:
    """Take casts, γ and β behind the norm into it."""
    while True:
        users = [op for op in norm.output.users if op.outputs]
        if len(users) != 1:
            return norm
        op, others = users[0], [v for v in users[0].inputs if v is not norm.output]
        if op.outputs[0].shape != norm.output.shape:
            return norm
        if op.base in {"_to_copy", "to"}:
            pass
        elif op.base == "mul" and len(others) == 1 and is_weight(others[0]) and norm.weight is None:
            norm.weight, norm.weight_offset = _gamma(others[0])
        elif (
            op.base == "add"
            and len(others) == 1
            and is_weight(others[0])
            and _is_vector(others[0], norm.output)
        ):
            pass
        elif not (norm.kind == "l2norm" and op.base in {"mul", "div"} and not others and _constant(op)):
            return norm
        norm.output = op.outputs[0]


def _is_vector(beta: Value, like: Value) -> bool:
    """A β has one entry a feature; a position embedding has one a token, too."""
    return math.prod(beta.shape) in {1, like.shape[-1]}


def _gamma(weight: Value) -> tuple[Value, float]:
    """γ, and 1.0 where the factor is 1 + γ."""
    weight = _same(weight)
    if weight.base == "add":
        number = _constant(weight.op)
        if number == 1.0:
            return _same(next(v for v in weight.op.inputs if v.learnt)), 1.0  # type: ignore[union-attr]
    return weight, 0.0


def _constant(op: Op | None) -> float | None:
    """The number an op adds or multiplies with; None where it is not one number."""
    assert op is not None
    for arg in op.args:
        if isinstance(arg, Value) and arg.number is not None:
            return arg.number
        if isinstance(arg, int | float) and not isinstance(arg, bool):
            return float(arg)
    return None


def _exponent(op: Op) -> float:
    return _float(op.arg(1, "exponent")) or 0.0


def _float(x: object) -> float | None:
    return float(x) if isinstance(x, int | float) else None


def _same(value: Value) -> Value:
    """`value` before casts and views."""
    while value.base in CASTS | VIEWS:
        value = value.source
    return value


def _chain(value: Value) -> list[Value]:
    """`value` and what it is a cast or view of."""
    chain = [value]
    while chain[-1].base in CASTS | VIEWS:
        chain.append(chain[-1].source)
    return chain


def _common(a: Value, b: Value) -> Value | None:
    """The last value that both are casts or views of: what a norm reads."""
    behind = set(_chain(b))
    return next((value for value in _chain(a) if value in behind), None)


def _unsquared(value: Value) -> Value:
    square = _same(value)
    if square.op is None:
        return value
    squared = square.base == "pow" and _exponent(square.op) == 2.0
    squared = squared or (square.base == "mul" and len(set(square.op.inputs)) == 1)
    return square.source if squared or square.base in {"square", "abs"} else value


def _uncentred(value: Value) -> tuple[Value, bool]:
    """a for a − mean(a), and whether it was that."""
    centred = _same(value)
    if centred.base != "sub" or centred.op is None or len(centred.op.inputs) != 2:
        return value, False
    a, mean = centred.op.inputs
    mean = _same(mean)
    source = _common(a, mean.source) if mean.base in _MEANS else None
    return (source, True) if source is not None else (value, False)
