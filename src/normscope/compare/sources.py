"""Residuals that are taken from a norm's output, as in x = norm(x) + f(norm(x)) amid Pre-LN layers.

The reading puts such a norm onto the stream, where it looks like Post-LN at the sum before it. Behind a
branch that has a norm at its entry it is the norm of the branch that follows, and the residual is taken from
another place. In a Post-LN stack no branch has a norm at its entry, and in Mix-LN's Post-LN blocks none has.
"""

from collections.abc import Sequence
from dataclasses import replace

from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME
from normscope.anatomy.residual import Sum
from normscope.compare.outcome import Outcome
from normscope.compare.types import Difference


def residuals_of_norms(blocks: Sequence[Sequence[Sum]], first_block: str) -> set[Sum]:
    """The sums of a stack whose residual is a norm's output; the norm becomes that of their branches.

    Args:
        blocks: the sums of each block, in order.
        first_block: path of the first block, whose modules tell its own norm from one of the embeddings.
    """
    sums = [total for block in blocks for total in block]
    found = set[Sum]()
    for before, total in zip([None, *sums[:-1]], sums, strict=True):
        norm = _norm_before(total)
        if norm is None:
            continue
        if before is None and not _is_inside(norm, first_block):
            continue
        if before is not None:
            if norm not in before.norms_behind or not all(branch.normed for branch in before.branches):
                continue
            before.norms_behind = [each for each in before.norms_behind if each is not norm]
        _take(total, norm)
        found.add(total)
    peers = {block[0] for block in blocks[1:] if block}
    if sums and peers and peers <= found and (norm := _norm_before(sums[0])) is not None:
        _take(sums[0], norm)  # all other blocks begin with such a norm of their own
        found.add(sums[0])
    return found


def _norm_before(total: Sum) -> FoundNorm | None:
    """The norm whose output is the residual, where the branches have none at their entry."""
    return None if any(branch.norms_in for branch in total.branches) else total.skip.behind(SAME).norm


def _take(total: Sum, norm: FoundNorm) -> None:
    """Make a norm that of the branches of a sum."""
    for branch in total.branches:
        branch.norms_in, branch.raw_entry = [norm], False


def _is_inside(norm: FoundNorm, block: str) -> bool:
    """Whether a block runs a norm or holds its weight."""
    weight = norm.weight.name if norm.weight is not None else None
    return any(f"{path}.".startswith(f"{block}.") for path in (norm.core.call.path, weight or ""))


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
