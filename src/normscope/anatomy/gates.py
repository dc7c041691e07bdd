"""What a gate lets through: the branch behind it, without the gate's own maps.

highway   t ⊙ F(x)                           lets F(x) through
GTrXL     z ⊙ tanh(W y + U (r ⊙ x))          is a GRU of the stream: it lets y through
"""

from dataclasses import dataclass

from normscope.anatomy.graph import Value, search
from normscope.anatomy.ops import PARTS, SAME, is_weight, matmul_operands, weight_of
from normscope.anatomy.terms import Term, direct_terms, scale_step


@dataclass(frozen=True)
class Through:
    """The branch behind a gate, and whether the gate is a GRU."""

    value: Value
    recurrent: bool = False


def let_through(value: Value, skip: Value, inside: set[Value]) -> Through:
    """What the gates on `value`, a term of a sum with `skip`, let through."""
    while True:
        factors = value.op.inputs if value.op is not None and value.base == "mul" else ()
        for factor in (value, *factors):
            if (candidate := _candidate(factor, skip)) is not None:
                return Through(candidate, recurrent=True)
        scaled = scale_step(value)
        if scaled is not None and scaled[0] in inside:
            value = scaled[0]
        elif value.base in SAME and value.source in inside:
            value = value.source
        else:
            return Through(value)


def _candidate(value: Value, skip: Value) -> Value | None:
    """y of tanh(W y + U (r ⊙ x)) with x the stream; None for anything else."""
    if value.base != "tanh" or value.op is None:
        return None
    inputs = [_mapped(term.value) for term in _terms(value.source)]
    if len(inputs) != 2 or None in inputs:
        return None
    reset = [_is_reset(v, skip) for v in inputs]
    return inputs[reset.index(False)] if sum(reset) == 1 else None


def _terms(value: Value) -> list[Term]:
    value = value.behind(SAME)
    return direct_terms(value.op) if value.op is not None else []


def _mapped(value: Value) -> Value | None:
    """The input of the parameterised matmul that `value`, or the tensor it is a part of, comes from."""
    while value.op is not None and weight_of(value.op) is None:
        bias = value.base == "add" and is_weight(value.op.inputs[-1])
        if value.base not in SAME | PARTS and not bias:
            return None
        value = value.source
    if value.op is None:
        return None
    weight = weight_of(value.op)
    return next(v for v in matmul_operands(value.op) or value.op.inputs if v is not weight).behind(SAME)


def _is_reset(value: Value | None, skip: Value) -> bool:
    """Whether this is r ⊙ x."""
    if value is None or value.op is None or value.base != "mul":
        return False
    views = search(value.op.inputs, lambda v: (v.source,) if v.base in SAME else ())
    return skip in set(views)
