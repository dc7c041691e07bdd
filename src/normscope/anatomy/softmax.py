"""Softmax in any spelling: PyTorch's, or exponentials over their sum."""

from collections.abc import Collection

from normscope.anatomy.axes import reduced_axes
from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import SAME, SOFTMAX, op_set

_QUOTIENTS = op_set("div true_divide")
_SHIFTS = op_set("amax max logsumexp")
_GUARDS = op_set("add clamp clamp_min maximum")
_MASKS = op_set("mul where masked_fill")


def logits_in(op: Op) -> Value | None:
    """The logits of the softmax whose last op this is; None for any other op.

    e^(x−m) / Σ e^(x−m), also with masked terms, an ε, or the reciprocal of the sum; e^(x−logsumexp(x)); and
    the exponential of a log-softmax. Σ runs over one axis, and m is a maximum.
    """
    if not op.inputs or not op.outputs:
        return None
    if op.base in SOFTMAX:
        return op.inputs[0]
    if op.base == "exp":
        return _of_logarithm(op.inputs[0].behind(SAME))
    factors = _factors(op)
    if factors is None or factors[1].behind(SAME | _GUARDS).base != "sum":
        return None
    terms = factors[0].behind(SAME)
    total = factors[1].behind(SAME | _GUARDS)
    exponential = _exponential(terms)
    if exponential is None or not _is_same(total.inputs[0].behind(SAME), terms):
        return None
    if total.op is None or len(reduced_axes(total.op)) != 1:
        return None
    return _without_shift(exponential.inputs[0])


def _factors(op: Op) -> tuple[Value, Value] | None:
    """The terms of a quotient and their sum."""
    if op.base in _QUOTIENTS and len(op.inputs) == 2:
        return op.inputs[0], op.inputs[1]
    if op.base != "mul" or len(op.inputs) != 2:
        return None
    a, b = op.inputs
    for terms, other in ((a, b), (b, a)):
        if other.behind(SAME).base == "reciprocal":
            return terms, other.behind(SAME).inputs[0]
    return None


def _is_same(summed: Value, terms: Value) -> bool:
    """Whether these are the terms, or the same exponentials once more."""
    both = [each for each in (summed, terms) if each.base == "exp"]
    return summed is terms or (len(both) == 2 and summed.inputs[0] is terms.inputs[0])


def _exponential(terms: Value) -> Value | None:
    """The exponentials behind terms that may be masked."""
    while terms.base in _MASKS:
        live = [each for each in terms.inputs if each.live and each.floating]
        if len(live) != 1:
            return None
        terms = live[0].behind(SAME)
    return terms if terms.base == "exp" else None


def _of_logarithm(value: Value) -> Value | None:
    """x of x − logsumexp(x), or of a log-softmax."""
    if value.base in {"_log_softmax", "log_softmax"}:
        return value.inputs[0]
    shifted = _without_shift(value, {"logsumexp"})
    return None if shifted is value else shifted


def _without_shift(value: Value, shifts: Collection[str] = _SHIFTS) -> Value:
    """x of x − m, where m is a reduction of x; else the value itself."""
    total = value.behind(SAME)
    if total.base == "sub" and len(total.inputs) == 2:
        x, shift = total.inputs[0], total.inputs[1].behind(SAME)
        if shift.base in shifts and shift.inputs[0].behind(SAME) is x.behind(SAME):
            return x
    return value
