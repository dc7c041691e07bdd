"""Find norms that are written out: products of a tensor with a factor that is made of the tensor itself.

The tensor is the last value that everything in the product comes through. Between the two there is a
reduction and no learnt map, so the factor is a statistic and no gate. `scaling` measures what the product is.
One that is no norm is kept: at the end of a branch or on the stream it is a part that was not read.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import (
    CONVOLUTIONS,
    FUSED_ATTENTION,
    MATMULS,
    SOFTMAX,
    is_mixing,
    op_set,
    same,
    weight_of,
)
from normscope.anatomy.replay import CannotReplay, Replay
from normscope.anatomy.scaling import Scaling, measure_scaling

_MIXTURES = MATMULS | CONVOLUTIONS
_PRODUCTS, _SUMS = op_set("mul div"), op_set("add sub")
_MOST_VALUES = 96


@dataclass(frozen=True)
class Part:
    """The values between a tensor and a result, without learnt maps.

    Attributes:
        gains, shifts: learnt tensors that multiply in it, and those that are added.
        values: its values, with the result and without the tensor.
    """

    start: Value
    end: Value
    gains: tuple[Value, ...]
    shifts: tuple[Value, ...]
    values: frozenset[Value]

    @property
    def reduces(self) -> bool:
        """True where something in it is computed from several elements."""
        return any(v.numel < self.start.numel or v.base in _MIXTURES for v in self.values)


@dataclass(frozen=True)
class OwnFactor:
    """A tensor times a factor of its own; `scaling` is None where it could not be measured."""

    part: Part
    scaling: Scaling | None


class OwnFactors:
    """The products of tensors with their own factors, found op by op in the order they ran.

    Attributes:
        others: those that are no norms, by their results.
    """

    def __init__(self, narrows: Mapping[Value, Value]) -> None:
        self.others: dict[Value, OwnFactor] = {}
        self._narrows, self._replay = narrows, Replay()

    def norm_at(self, op: Op, norms: Container[Value]) -> tuple[Part, Scaling] | None:
        """The norm that ends in an op, with the part that computes it; `norms` end in these values."""
        part, axes, factors = self._candidate(op)
        if part is None:
            return None
        scaling = self._measure(part, axes, factors)
        if scaling is None or not scaling.norm:
            return None
        while (wider := self._wider(part, scaling, norms)) is not None:
            part, scaling = wider
        for value in part.values:
            self.others.pop(value, None)
        return part, scaling

    def _candidate(self, op: Op) -> tuple[Part | None, tuple[int, ...] | None, list[Value]]:
        """The part behind a product, or behind a sum with such a product (x·s − mean(x)·s)."""
        nothing: tuple[None, None, list[Value]] = None, None, []
        if op.base not in _PRODUCTS | _SUMS or len(op.inputs) != 2 or not op.outputs:
            return nothing
        a, b = op.inputs
        end = op.outputs[0]
        if not (a.live and b.live and end.floating) or same(a) is same(b):
            return nothing
        axes = None
        if op.base in _SUMS:
            known = next((k for v in (a, b) if (k := self.others.get(same(v))) is not None), None)
            axes = known.scaling.axes if known is not None and known.scaling is not None else None
            if axes is None:
                return nothing
        start = self._narrows.get(end)
        part = part_between(start, end) if start is not None else None
        if part is None or not part.reduces or not {a, b} <= {start, *part.values}:
            return nothing
        return part, axes, [b] if op.base == "div" else [b, a]

    def _measure(self, part: Part, axes: tuple[int, ...] | None, factors: list[Value]) -> Scaling | None:
        """The scaling of a part, kept where it is no norm."""
        try:
            scaling = self._scaling(part, axes, factors)
        except CannotReplay:
            self.others[part.end] = OwnFactor(part, None)
            return None
        if scaling is not None and not scaling.norm:
            self.others[part.end] = OwnFactor(part, scaling)
        return scaling

    def _scaling(self, part: Part, axes: tuple[int, ...] | None, factors: list[Value]) -> Scaling | None:
        starts = (part.start, *part.gains, *part.shifts)
        ends = (part.end, *(f for f in factors if f not in starts))
        return self._replay.once(measure_scaling, starts, ends, len(part.gains), axes)

    def _wider(self, part: Part, scaling: Scaling, norms: Container[Value]) -> tuple[Part, Scaling] | None:
        """The same norm from an earlier tensor, which was centred or scaled by a factor of its own."""
        earlier = self._narrows.get(part.start)
        before = part_between(earlier, part.start) if earlier is not None else None
        if earlier is None or before is None or not before.reduces or any(v in norms for v in before.values):
            return None
        whole = part_between(earlier, part.end)
        if whole is None:
            return None
        try:
            wider = self._scaling(whole, scaling.axes, [])
        except CannotReplay:
            return None
        return (whole, wider) if wider is not None and wider.norm else None


def part_between(start: Value, end: Value) -> Part | None:
    """The part from `start` to `end`; None where it has a learnt map or a softmax, or is long."""
    if start.numel != end.numel or not start.floating:
        return None
    values = _values_between(start, end)
    gains, shifts, gained = dict[Value, None](), dict[Value, None](), set[Value]()
    for value in values:
        op = value.op
        assert op is not None, "a value of a part has an op"
        if op.base in SOFTMAX | FUSED_ATTENTION or is_mixing(op, op.inputs):
            return None
        weights = dict.fromkeys(v for v in op.inputs if v.is_weight)
        if weights and op.base not in _PRODUCTS | _SUMS:
            return None
        (gains if op.base in _PRODUCTS else shifts).update(weights)
        if not gained.isdisjoint(op.inputs) and (op.base in _MIXTURES or value.numel < op.source.numel):
            return None  # a sum of products with weights is a learnt map
        if not gained.isdisjoint(op.inputs) or (op.base in _PRODUCTS and any(w.numel > 1 for w in weights)):
            gained.add(value)
    if end not in values or gains.keys() & shifts.keys():
        return None
    return Part(start, end, (*gains,), (*shifts,), frozenset(values))


def _values_between(start: Value, end: Value) -> list[Value]:
    """The values on the ways from `start` to `end`, in order, with `end`; none where there are many."""
    met, stack = set[Value](), [end]
    while stack:
        value = stack.pop()
        if value not in met and value.live and value.index > start.index:
            met.add(value)
            if len(met) > _MOST_VALUES or weight_of(value.op) is not None:
                return []
            stack.extend(value.inputs)
    reached = {start}
    for value in sorted(met, key=lambda v: v.index):
        if not reached.isdisjoint(value.inputs):
            reached.add(value)
    return sorted(reached - {start}, key=lambda v: v.index)
