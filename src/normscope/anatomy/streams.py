"""Chain sums into streams: which sum the skip of the next one comes from, and through which norms.

A skip that is the last sum, or its norm, continues the stream. A skip that comes from it some other way
(patch merging, pooling, an activation) opens a new stage. A skip that comes from no sum at all opens a new
stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from normscope.anatomy.graph import Op, Value, inputs_of, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import PARTS, SAME, is_weight
from normscope.anatomy.residual import Sum
from normscope.anatomy.terms import core, direct_terms, scale_step

_POOLING = PARTS | {"mean", "sum", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d"}


@dataclass(eq=False)
class Link:
    """Where a skip comes from: the sum before, the norms passed, whether anything else lies between."""

    before: Sum | None
    norms: list[FoundNorm] = field(default_factory=list)
    direct: bool = True
    others: list[Sum] = field(default_factory=list)


def link(total: Sum, by_value: dict[Value, Sum], norms: dict[Value, FoundNorm]) -> Link:
    """The link from `total` back to the sum before it."""
    value, passed = total.skip, [total.skip_norm] if total.skip_norm is not None else []
    # A norm on the skip itself (nGPT) is computed from the skip value, after whatever came before it.
    while True:
        if value in by_value:
            return Link(by_value[value], passed)
        norm, back = norms.get(value), step_back(value)
        if norm is not None:
            passed, value = [norm, *passed], norm.input
        elif back is not None:
            value = back
        else:
            break
    found = nearest(value, by_value)
    if not found:
        return Link(None)
    last = max(found, key=lambda s: s.value.index)
    return Link(last, passed, direct=False, others=[s for s in found if s is not last])


def step_back(value: Value) -> Value | None:
    """One step back through what leaves a stream as it is: views, casts, dropout, scales, shifts, rejoins."""
    if value.op is None or value.goes_on is not None:
        return value.goes_on
    if value.base in SAME:
        return value.source
    scaled = scale_step(value)
    if scaled is not None and scaled[1] != "gate":
        return scaled[0]
    if value.base == "add" and len(value.op.inputs) == 2 and is_weight(value.op.inputs[1]):
        return value.op.inputs[0]
    terms = [term.value for term in direct_terms(value.op)]
    return terms[0] if len(terms) > 1 and len({core(v) for v in terms}) == 1 else None  # a·x + b·x


def came_from(value: Value) -> Iterator[Value]:
    """`value`, and what it was before scales, views and rejoins, back to a sum or another op's output."""
    here: Value | None = value
    while here is not None:
        yield here
        here = step_back(here)


def nearest(value: Value, by_value: dict[Value, Sum]) -> list[Sum]:
    """The sums that `value` comes from with no other sum between."""
    met = search([value], lambda v: () if v in by_value else inputs_of(v))
    return [by_value[v] for v in met if v in by_value]


def norms_on(value: Value, norms: dict[Value, FoundNorm], pooled: bool = False) -> list[FoundNorm]:
    """Norms that read `value` itself, or (`pooled`) a part or a mean of it, in order."""

    def step(here: Value) -> Iterator[Value]:
        for op in here.users:
            if op.base in SAME or (pooled and op.base in _POOLING) or _is_scale(op, here):
                yield from op.outputs

    readings = set(search([value], step))
    return sorted((n for n in norms.values() if n.input in readings), key=lambda n: n.output.index)


def _is_scale(op: Op, value: Value) -> bool:
    return bool(op.outputs) and step_back(op.outputs[0]) is value
