"""The term that a branch adds, also where its last factor is inside the add: addcmul, lerp, α of an add."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from normscope.anatomy import Branch, Fused, Site
from normscope.probes.rows import Found, at
from normscope.probes.sums import exact


def sites_of_added(branch: Branch) -> Iterator[Site]:
    """Sites that `added` needs."""
    yield branch.output
    yield from (weight.site for weight in branch.fused or () if isinstance(weight, Fused))


def added(branch: Branch, captured: Mapping[Site, Tensor]) -> Found:
    """The term as it enters the sum, in float64 where a factor is applied; or why there is none."""
    if branch.fused is None:
        return "one op computes and adds the term (addmm): it is no tensor of its own"
    term = at(captured, branch.output)
    for weight in branch.fused:
        if isinstance(term, str):
            return term
        by = weight if isinstance(weight, float) else at(captured, weight.site)
        if isinstance(by, str):
            return by
        by = by if isinstance(by, float) else exact(by)
        if isinstance(weight, Fused) and weight.how == "over":
            term = exact(term) / by
        elif isinstance(weight, Fused) and weight.how == "rest":
            term = exact(term) * (1 - by)
        else:
            term = exact(term) * by
    return term
