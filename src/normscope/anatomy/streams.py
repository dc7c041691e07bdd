"""Chain sums into streams: find the sum that each skip comes from, and the norms between.

A skip that is the last sum, or its norm, continues the stream. A skip that comes from it through other ops
(patch merging, pooling, an activation) starts a new stage. A skip that comes from no sum starts a new stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from normscope.anatomy.graph import Value, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import PARTS, SAME, op_set
from normscope.anatomy.residual import Sum
from normscope.anatomy.terms import core, direct_terms, scale_step

_POOLING = PARTS | op_set("mean sum avg_pool1d avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d")


@dataclass(eq=False)
class Link:
    """The origin of a skip: the sum before, the norms passed, whether nothing else lies between."""

    before: Sum | None
    norms: list[FoundNorm] = field(default_factory=list)
    direct: bool = True
    others: list[Sum] = field(default_factory=list)


def link(total: Sum) -> Link:
    """The link from `total` back to the sum before it."""
    value: Value | None = total.skip
    passed = [total.skip_norm] if total.skip_norm is not None else []
    # A norm on the skip itself (nGPT) is computed from the skip value.
    while value is not None:
        if value.sum is not None:
            return Link(value.sum, passed)
        last = value
        if value.norm is not None:
            passed, value = [value.norm, *passed], value.norm.input
        else:
            value = step_back(value)
    found = nearest(last)
    if not found:
        return Link(None)
    before = max(found, key=lambda s: s.value.index)
    return Link(before, passed, direct=False, others=[s for s in found if s is not before])


def step_back(value: Value) -> Value | None:
    """One step back through ops that keep a stream: views, casts, dropout, scales, shifts, rejoins."""
    if value.op is None or value.goes_on is not None:
        return value.goes_on
    if value.base in SAME:
        return value.source
    scaled = scale_step(value)
    if scaled is not None and scaled[1] != "gate":
        return scaled[0]
    if value.base == "add" and len(value.inputs) == 2 and value.inputs[1].is_weight:
        return value.source
    terms = [term.value for term in direct_terms(value.op)]
    return terms[0] if len(terms) > 1 and len({core(v) for v in terms}) == 1 else None  # a·x + b·x


def came_from(value: Value) -> Iterator[Value]:
    """`value`, and what it was before scales, views and rejoins, back to a sum or another op's output."""
    here: Value | None = value
    while here is not None:
        yield here
        here = step_back(here)


def nearest(value: Value) -> list[Sum]:
    """The sums that `value` comes from with no other sum between."""
    met = search([value], lambda v: () if v.sum is not None else v.inputs)
    return [v.sum for v in met if v.sum is not None]


def norms_on(value: Value, pooled: bool = False) -> list[FoundNorm]:
    """Norms that read `value` itself, or (`pooled`) a part or a mean of it, in order."""

    def step(here: Value) -> Iterator[Value]:
        for after in here.successors:
            if after.base in SAME or (pooled and after.base in _POOLING) or step_back(after) is here:
                yield after

    found = (norm for reading in search([value], step) for norm in reading.norms_behind)
    return sorted(found, key=lambda n: n.output.index)
