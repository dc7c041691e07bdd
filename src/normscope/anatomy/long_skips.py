"""Find the sums that add an earlier point of the stream to a later one, with no branch between.

    x ← a·x + b·x₀      nanochat, modded-nanogpt: the embedding comes in again, with learnt factors
    x ← x + x_i         a U-net: what an earlier block left
    x ← x − c·x_i       nanochat: a share of the middle is taken out before the head

Such a sum adds no branch: the stream goes on from its later term, and the earlier one is a long skip.
"""

from dataclasses import dataclass

from normscope.anatomy.graph import Value
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import came_from, link
from normscope.anatomy.terms import Term, core, direct_terms


@dataclass(frozen=True)
class Rejoin:
    """A sum of points of one stream: the later one is a term, the earlier ones are values."""

    total: Sum
    later: Term
    earlier: tuple[Value, ...]


def find_rejoins(sums: list[Sum]) -> list[Rejoin]:
    """The rejoins among `sums`, in order; marks what goes on in each, which is no residual sum any more."""
    found: list[Rejoin] = []
    for total in sums:
        later = total.terms[0]
        point = core(later.value)
        if len(total.terms) > 1 or later.inner or total.several:
            continue
        if point is not total.value and _leads_back(point, total.skip):
            total.value.sum = None
            total.value.goes_on = later.value
            found.append(Rejoin(total, later, (total.skip, *total.long_skips)))
    return found


def _leads_back(point: Value, earlier: Value) -> bool:
    """True where the stream at `point`, a sum or what goes on from one, was once `earlier`."""
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
