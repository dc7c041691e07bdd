"""Find the sums that add an earlier point of the stream to a later one, with no branch between.

    x ← a·x + b·x₀      nanochat, modded-nanogpt: the embedding comes in again, with learnt factors
    x ← x + x_i         a U-net: what an earlier block left
    x ← x − c·x_i       nanochat: a share of the middle is taken out before the head

Such a sum adds no branch: the stream continues from its later term, and the earlier term is a long skip.
"""

from dataclasses import dataclass

from normscope.anatomy.graph import Value
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import came_from, link
from normscope.anatomy.terms import Term, core, direct_terms


@dataclass(frozen=True)
class Rejoin:
    """A sum of points of one stream: the latest as a term, the earlier ones as values."""

    total: Sum
    later: Term
    earlier: tuple[Value, ...]


def find_rejoins(sums: list[Sum]) -> list[Rejoin]:
    """The rejoins among `sums`, in order. Their values are marked as no residual sum (`Value.goes_on`)."""
    found: list[Rejoin] = []
    for total in sums:
        later = total.terms[0]
        point = core(later.value)
        if len(total.terms) > 1 or later.inner or total.several:
            continue
        if point.sum is not None and point.sum.is_inside(total):
            continue
        if point is not total.value and _leads_back(point, total.skip):
            total.value.sum = None
            total.value.goes_on = later.value
            found.append(Rejoin(total, later, (total.skip, *total.long_skips)))
    return found


def _leads_back(point: Value, earlier: Value) -> bool:
    """True where the stream at `point`, a sum or its continuation, passed through `earlier`."""
    while point.goes_on is not None:
        point = core(point.goes_on)
    total = point.sum
    *_, source = came_from(earlier)
    while total is not None:
        *_, first = came_from(total.skip)
        terms = [*(direct_terms(first.op) if first.sum is None else ()), *total.terms]
        if source in {total.value, *came_from(total.skip), *(core(term.value) for term in terms)}:
            return True
        before = link(total)
        total = before.before if before.direct else None
    return False
