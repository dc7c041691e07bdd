"""Comparison of a reading with the intended placement."""

from typing import get_args

from normscope.anatomy.types import Anatomy, Placement
from normscope.errors import UsageError, suggest
from normscope.nn.schemes import SCHEMES

PLACEMENTS: tuple[str, ...] = get_args(Placement)


def departures(anatomy: Anatomy, expected: str) -> list[str]:
    """A line for each branch with another placement, and for each part that could not be read.

    Args:
        expected: a placement (pre, post, res-post, peri, none), or a scheme of the catalogue. A scheme is
            compared by the name that the reading gives it.

    Raises:
        UsageError: `expected` is neither.
    """
    known = [*PLACEMENTS, *(name for name in SCHEMES if name not in PLACEMENTS)]
    if expected not in known:
        kinds = f"{', '.join(PLACEMENTS)}, or a scheme that `normscope schemes` lists"
        raise UsageError(f'placement "{expected}"', kinds, suggest(expected, known, "choose one"))
    wanted = {expected} | ({SCHEMES[expected].reads_as} if expected in SCHEMES else set())
    lines = [
        f"{branch.site}: {branch.scheme or branch.placement}, expected {expected}"
        for branch in anatomy.branches
        if wanted.isdisjoint((branch.placement, branch.scheme))
    ]
    if not anatomy.branches:
        lines.append(f"no branch was read, expected {expected}")
    return lines + [f"not read: {words}" for words in anatomy.unread]
