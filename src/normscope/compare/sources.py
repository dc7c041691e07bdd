"""Residuals that are taken from a norm's output, as in x = norm(x) + f(norm(x)) amid Pre-LN layers.

The reading puts such a norm onto the stream, where it looks like Post-LN at the sum before it. Amid branches
with norms at their entries it is the norm of its own branch, and the residual is taken from another place.
"""

from collections.abc import Sequence
from dataclasses import replace

from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME
from normscope.anatomy.residual import Sum
from normscope.compare.outcome import Outcome
from normscope.compare.types import Difference


def residuals_of_norms(sums: Sequence[Sum], first_block: str) -> set[Sum]:
    """The sums of a stack whose residual is a norm's output; the norm becomes that of their branches.

    Args:
        sums: in order.
        first_block: path of the first block, whose modules tell its own norm from one of the embeddings.
    """
    branches = [branch for each in sums for branch in each.branches]
    if 2 * sum(branch.normed for branch in branches) <= len(branches):
        return set()
    found = set[Sum]()
    for before, total in zip([None, *sums[:-1]], sums, strict=True):
        norm = total.skip.behind(SAME).norm
        if norm is None or any(branch.norms_in for branch in total.branches):
            continue
        if before is None and not f"{norm.core.call.path}.".startswith(f"{first_block}."):
            continue
        if before is not None:
            if norm not in before.norms_behind or not all(branch.normed for branch in before.branches):
                continue  # Mix-LN: Post-LN blocks before Pre-LN ones
            before.norms_behind = [each for each in before.norms_behind if each is not norm]
        for branch in total.branches:
            branch.norms_in, branch.raw_entry = [norm], False
        found.add(total)
    return found


def final_norm_behind(sums: Sequence[Sum]) -> FoundNorm | None:
    """Take the norm after the last sum off it, where no other sum has one: it is the final norm."""
    last = sums[-1]
    if not last.norms_behind or any(each.norms_behind for each in sums[:-1]):
        return None
    norm, last.norms_behind = last.norms_behind[0], last.norms_behind[1:]
    return norm


_MOVED = {"placement", "embedding-norm", "final-norm", "norm"}
"""Names under which the function part finds such a residual, as it walks along the anatomy."""


def with_residual_source(function: Outcome, structure: Sequence[Difference]) -> Outcome:
    """The function part with a residual from a norm's output under its name, as the structure has it.

    The norms that were moved there are those that the structure does not find elsewhere.
    """
    source = next((each for each in structure if each.name == "residual-source"), None)
    named = {(each.name, site) for each in structure for site in each.sites}
    moved = [each for each in function.differences if each.name in _MOVED]
    moved = [each for each in moved if not any((each.name, site) in named for site in each.sites)]
    if source is None or not moved:
        return function
    known = [each.confirmed for each in moved]
    one = replace(
        source,
        part=moved[0].part,
        evidence=tuple(dict.fromkeys(line for each in moved for line in each.evidence)),
        confirmed=None if None in known else all(known),
        is_first=any(each.is_first for each in moved),
    )
    differences = tuple(
        one if each is moved[0] else each for each in function.differences if each not in moved[1:]
    )
    compared = function.compared
    if one.is_first:
        compared = replace(compared, said=f"not the same function: {one.message}")
    return replace(function, compared=compared, differences=differences)
