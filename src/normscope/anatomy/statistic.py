"""Find the statistic behind a scale, through roots, ε, clamps, constant factors, casts and views."""

from dataclasses import dataclass

from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import CASTS, SAME, VIEWS, op_set

MEANS = op_set("mean var std var_mean std_mean")
CENTRED = op_set("var std var_mean std_mean")
_NORMS = op_set("linalg_vector_norm norm std std_mean")
_REDUCTIONS = MEANS | _NORMS | op_set("sum _weight_norm_interface")
_ROOTS = op_set("rsqrt sqrt reciprocal pow clamp clamp_min maximum where abs")
_POWERS = {"rsqrt": -0.5, "sqrt": 0.5, "reciprocal": -1.0}


@dataclass
class Statistic:
    """Parts of a scale factor: gain · (reduction + ε)^power.

    An ε outside of the root is dropped, and so is a floor, max(·, ε).
    """

    reduced: Value
    op: Op
    eps: float | None
    gain: float


def find_statistic(scale: Value) -> Statistic | None:
    """The reduction behind a scale, through roots, ε, clamps and constant factors; None without one."""
    eps, gain, power, rooted = None, 1.0, 1.0, False
    for _ in range(12):
        op = scale.op
        if op is None:
            return None
        if op.base in _REDUCTIONS:
            rooted = rooted or op.base in _NORMS
            if not rooted or (op.base == "linalg_vector_norm" and op.arg(1, "ord", 2) != 2):
                return None
            return Statistic(op.inputs[0], op, eps, gain)
        if op.base in SAME:
            scale = op.inputs[0]
        elif op.base in _ROOTS:
            step = _POWERS.get(op.base, _exponent(op) if op.base == "pow" else 1.0)
            power, rooted = power * step, rooted or abs(step) == 0.5
            scale = next((v for v in op.inputs if v.live), op.inputs[0])
        elif op.base in {"add", "mul", "div"}:
            live = [v for v in op.inputs if v.live]
            if len(live) != 1:
                return None
            number = constant_of(op)
            if op.base == "add":
                eps = number if rooted else eps  # σ + ε: not under the root
            elif number is not None and number > 0:
                gain *= number**power if op.base == "mul" else number**-power
            scale = live[0]
        else:
            return None
    return None


def constant_of(op: Op) -> float | None:
    """The number an op adds or multiplies with; None where it is not one number."""
    for arg in op.args:
        if isinstance(arg, Value) and arg.number is not None:
            return arg.number
        if isinstance(arg, int | float) and not isinstance(arg, bool):
            return float(arg)
    return None


def _exponent(op: Op) -> float:
    return as_float(op.arg(1, "exponent")) or 0.0


def as_float(x: object) -> float | None:
    """A Python number as a float; None for anything else."""
    return float(x) if isinstance(x, int | float) else None


def same(value: Value) -> Value:
    """`value` before casts and views."""
    return value.behind(CASTS | VIEWS)


def common(a: Value, b: Value) -> Value | None:
    """The last value that both are casts or views of: the input of a norm."""
    behind = set(b.through(CASTS | VIEWS))
    return next((value for value in a.through(CASTS | VIEWS) if value in behind), None)


def unsquared(value: Value) -> Value:
    """a for a², |a| or a·a, else the value itself."""
    square = same(value)
    if square.op is None:
        return value
    squared = square.base == "pow" and _exponent(square.op) == 2.0
    squared = squared or (square.base == "mul" and len(set(square.inputs)) == 1)
    return square.source if squared or square.base in {"square", "abs"} else value


def uncentred(value: Value) -> tuple[Value, bool]:
    """a and True for a − mean(a), else the value and False."""
    centred = same(value)
    if centred.base != "sub" or len(centred.inputs) != 2:
        return value, False
    a, mean = centred.inputs
    mean = same(mean)
    source = common(a, mean.source) if mean.base in MEANS else None
    return (source, True) if source is not None else (value, False)
