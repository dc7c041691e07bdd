"""Reasons for which a conversion of the weights makes up: another rotary layout, a folded scale.

Each of the two, the change of the weights and the change of the computation, is a difference alone; together
they are none.
"""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from normscope.compare.holdings import Holdings
from normscope.compare.keys import At
from normscope.compare.mapping.changes import INTERLEAVED, SPLIT, Change
from normscope.compare.reasons.search import Found

_FOLDED = {
    "attention-scale": ("q", "k"),
    "branch-scale": ("o", "down"),
    "embedding-scale": ("embedding",),
    "head-scale": ("head",),
}
"""Scale → roles of the weights into which it can be folded."""
_ENDS = ("embedding", "head")
_DIGITS = 1e-4


def without_made_up(
    found: Sequence[Found], changed: Sequence[Change], b: Holdings
) -> tuple[list[Found], list[Change]]:
    """The reasons and the changes of weights without those that make up for each other.

    Args:
        found: reasons of the function part.
        changed: how B's given weights differ from A's.
        b: B with its given weights.
    """
    made = {id(reason): changes for reason in found if (changes := _made_up(reason, changed, b))}
    done = {id(change) for changes in made.values() for change in changes}
    left = [each for each in found if id(each) not in made]
    return left, [each for each in changed if id(each) not in done]


def _made_up(found: Found, changed: Sequence[Change], b: Holdings) -> list[Change]:
    """The changes of weights that make up for a reason; empty where they do not."""
    if found.reason.name == "rotary-layout":
        return _turned(found, changed, b)
    return _folded(found, changed, b) if found.reason.name in _FOLDED else []


def _turned(found: Found, changed: Sequence[Change], b: Holdings) -> list[Change]:
    """The rows of q and k in the order that B's layout needs, biases too."""
    words = INTERLEAVED if found.reason.a == "halves" else SPLIT
    near = [each for each in changed if each.role in ("q", "k") and each.at == found.b]
    is_turned = all(each.name == "weights-order" and each.b == words for each in near)
    ordered = {key for key, value in _values(b, found.b, ("q", "k")) if bool((value != value[:1]).any())}
    return near if is_turned and ordered == _keys(near) else []


def _folded(found: Found, changed: Sequence[Change], b: Holdings) -> list[Change]:
    """The weights that hold the scale which B lacks, or A; all of a role, so biases too."""
    left, right, roles = found.reason.a, found.reason.b, _FOLDED[found.reason.name]
    at = None if roles[0] in _ENDS else found.b
    near = [each for each in changed if each.role in roles and at in (None, each.at)]
    scaled = {each.role for each in near}
    held = {key for key, value in _values(b, at, tuple(scaled)) if bool(value.any())}
    if not near or held != _keys(near) or any(each.name != "weights-scaled" for each in near):
        return []
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return []
    factor = 1.0
    for role in scaled:
        factors = [each.b for each in near if each.role == role and isinstance(each.b, float)]
        if not math.isclose(min(factors), max(factors), rel_tol=_DIGITS):
            return []
        factor *= factors[0]
    return near if math.isclose(factor * right, left, rel_tol=_DIGITS) else []


def _keys(changes: Sequence[Change]) -> set[tuple[str, str]]:
    return {(each.weight, each.role) for each in changes}


def _values(b: Holdings, at: At | None, roles: Sequence[str]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """(weight, role) of B, and its elements; `at` None is anywhere."""
    for held in b.held:
        for piece in held.pieces:
            if piece.slot.role in roles and at in (None, piece.slot.at):
                yield (held.name, piece.slot.role), held.value.flatten()[piece.elements]
