"""Ways from the projections of an attention to its operands."""

from collections.abc import Iterator
from dataclasses import dataclass

from normscope.anatomy.graph import Op, Value, between
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import weight_of
from normscope.compare.activation import biased


@dataclass(frozen=True)
class Way:
    """The way from a projection to an operand of an attention.

    Attributes:
        start: output of the projection, with its bias.
        norms: the norms on the way, in order.
        operand: the tensor that is multiplied.
        width: features of the projection.
    """

    start: Value
    norms: tuple[FoundNorm, ...]
    operand: Value
    width: int

    @property
    def after(self) -> Value:
        """Place at which the way goes on after its last norm."""
        return self.norms[-1].output if self.norms else self.start

    def segments(self) -> Iterator[tuple[Value, Value]]:
        """The parts of the way between its norms."""
        starts = [self.start, *(norm.output for norm in self.norms)]
        ends = [*(norm.input for norm in self.norms), self.operand]
        return zip(starts, ends, strict=True)


def way_to(operand: Value) -> Way | None:
    """The way to an operand; None where no projection makes it."""
    made = _projection_behind(operand)
    if made is None:
        return None
    start = biased(made)
    inside = set(between(start, operand))
    if not inside and start is not operand:
        start = made.outputs[0]
        inside = set(between(start, operand))
    norms = [v.norm for v in sorted(inside, key=lambda v: v.index) if v.norm is not None]
    kept = tuple(norm for norm in norms if norm.input in inside or norm.input is start)
    return Way(start, kept, operand, made.outputs[0].shape[-1])


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
