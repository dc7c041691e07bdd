"""Reasons for which a conversion of the weights makes up: another rotary layout, a folded scale.

Each of the two, the change of the weights and the change of the computation, is a difference alone; together
they are none.
"""

import math
from collections.abc import Sequence

from normscope.compare.mapping.changes import INTERLEAVED, SPLIT, Change
from normscope.compare.reasons.search import Found

_FOLDED = {
    "attention-scale": ("q", "k"),
    "branch-scale": ("o", "down"),
    "embedding-scale": ("embedding",),
    "head-scale": ("head",),
}
"""Scale → roles of the weights into which it can be folded."""
_DIGITS = 1e-4


def without_made_up(found: Sequence[Found], changed: Sequence[Change]) -> tuple[list[Found], list[Change]]:
    """The reasons and the changes of weights without those that make up for each other."""
    made = {id(reason): changes for reason in found if (changes := _made_up(reason, changed))}
    done = {id(change) for changes in made.values() for change in changes}
    left = [each for each in found if id(each) not in made]
    return left, [each for each in changed if id(each) not in done]


def _made_up(found: Found, changed: Sequence[Change]) -> list[Change]:
    """The changes of weights that make up for a reason; empty where they do not."""
    reason = found.reason
    if reason.name == "rotary-layout":
        return _turned(found, changed)
    if reason.name in _FOLDED:
        return _folded(found, changed)
    return []


def _turned(found: Found, changed: Sequence[Change]) -> list[Change]:
    """The rows of q and of k in the order that B's layout needs, and no other change of these weights."""
    words = INTERLEAVED if found.reason.a == "halves" else SPLIT
    near = [each for each in changed if each.at == found.b and each.role in ("q", "k")]
    is_whole = {each.role for each in near} == {"q", "k"}
    return near if is_whole and all(e.name == "weights-order" and e.b == words for e in near) else []


def _folded(found: Found, changed: Sequence[Change]) -> list[Change]:
    """The weights that hold the scale which B lacks, or A."""
    a, b, roles = found.reason.a, found.reason.b, _FOLDED[found.reason.name]
    near = [
        each
        for each in changed
        if each.role in roles and (each.at == found.b or each.role in ("embedding", "head"))
    ]
    if not near or any(each.name != "weights-scaled" for each in near):
        return []
    if not (isinstance(a, int | float) and isinstance(b, int | float)):
        return []
    factor = 1.0
    for role in {each.role for each in near}:
        factors = [each.b for each in near if each.role == role and isinstance(each.b, float)]
        if not math.isclose(min(factors), max(factors), rel_tol=_DIGITS):
            return []
        factor *= factors[0]
    return near if math.isclose(factor * b, a, rel_tol=_DIGITS) else []
