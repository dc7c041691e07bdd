"""Find the branch behind a gate, without the gate's own maps.

highway   t ⊙ F(x)                           passes F(x)
GTrXL     z ⊙ tanh(W y + U (r ⊙ x))          is a GRU of the stream: it passes y
"""

from normscope.anatomy.graph import Value
from normscope.anatomy.ops import PARTS, SAME, matmul_operands, weight_of
from normscope.anatomy.terms import direct_terms, scale_step


def let_through(value: Value, skip: Value, inside: set[Value]) -> tuple[Value, bool]:
    """The branch behind the gates on `value`, a term of a sum with `skip`; and whether a gate is a GRU."""
    while True:
        for factor in (value, *(value.inputs if value.base == "mul" else ())):
            if (candidate := _candidate(factor, skip)) is not None:
                return candidate, True
        scaled = scale_step(value)
        if scaled is not None and scaled[0] in inside:
            value = scaled[0]
        elif value.base in SAME and value.source in inside:
            value = value.source
        else:
            return value, False


def _candidate(value: Value, skip: Value) -> Value | None:
    """y of tanh(W y + U (r ⊙ x)) with x the stream; None for anything else."""
    if value.base != "tanh":
        return None
    terms = direct_terms(value.source.behind(SAME).op)
    inputs = [v for term in terms if (v := _mapped(term.value)) is not None]
    if len(terms) != 2 or len(inputs) != 2:
        return None
    reset = [_is_reset(v, skip) for v in inputs]
    return inputs[reset.index(False)] if sum(reset) == 1 else None


def _mapped(value: Value) -> Value | None:
    """The input of the parameterised matmul that `value`, or the tensor it is a part of, comes from."""
    while (weight := weight_of(value.op)) is None:
        bias = value.base == "add" and value.inputs[-1].is_weight
        if value.base not in SAME | PARTS and not bias:
            return None
        value = value.source
    return next(v for v in matmul_operands(value.op) or value.inputs if v is not weight).behind(SAME)


def _is_reset(value: Value, skip: Value) -> bool:
    """True where this is r ⊙ x."""
    return value.base == "mul" and any(skip in set(factor.through(SAME)) for factor in value.inputs)
