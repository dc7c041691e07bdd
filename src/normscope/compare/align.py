"""Align two structures, so that an inserted or deleted block is one difference and not a cascade.

Stacks, blocks and branches are aligned by dynamic programming (Needleman and Wunsch 1970): the cheapest
sequence of pairs and gaps. A gap costs more than any pair of places of one kind, so that a fact that differs
in every block does not part the towers. Where all blocks are alike, the last ones count as the inserted ones.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from normscope.compare.facts import FACTS, differing
from normscope.compare.types import Pair, Place

GAP = 1.0
"""Cost of a branch without a partner; a block costs its branches and half a gap more."""
_FACT, _MOST_FACTS = 0.05, 0.7
_OTHER_KIND, _NEVER = 1.2, 9.0
_MIXERS = {"attention", "cross-attention", "other"}

Cost = Callable[[Place, Place], float]


def align(a: Place, b: Place) -> Pair:
    """The two models with their stacks, blocks and branches in pairs."""
    stacks = _aligned(a.parts, b.parts, _stack_cost, lambda stack: GAP)
    return Pair(a, b, tuple(_stack_pair(x, y) for x, y in stacks))


def _stack_pair(a: Place | None, b: Place | None) -> Pair:
    if a is None or b is None:
        return _alone(a, b)
    a, b = regrouped(a, like=b), regrouped(b, like=a)
    cost = _Remembered(_block_cost)
    blocks = _aligned(a.parts, b.parts, cost, lambda block: GAP * (0.5 + len(block.parts)))
    return Pair(a, b, tuple(_block_pair(x, y) for x, y in blocks))


def _block_pair(a: Place | None, b: Place | None) -> Pair:
    if a is None or b is None:
        return _alone(a, b)
    return Pair(a, b, tuple(Pair(x, y) for x, y in _branches(a, b)))


def _alone(a: Place | None, b: Place | None) -> Pair:
    """A place without a partner, with its parts."""
    here = a or b
    assert here is not None, "one of the two exists"
    parts = (_alone(each, None) if a is not None else _alone(None, each) for each in here.parts)
    return Pair(a, b, tuple(parts))


def _branches(a: Place, b: Place) -> list[tuple[Place | None, Place | None]]:
    return _aligned(a.parts, b.parts, _branch_cost, lambda branch: GAP)


def _stack_cost(a: Place, b: Place) -> float:
    same_role = a.facts.get("role") == b.facts.get("role")
    return (0.0 if same_role else 0.9) + _fact_cost(a, b)


def _block_cost(a: Place, b: Place) -> float:
    pairs = _branches(a, b)
    inside = sum(GAP if x is None or y is None else _branch_cost(x, y) for x, y in pairs)
    return inside + _fact_cost(a, b)


def _branch_cost(a: Place, b: Place) -> float:
    kinds = {a.facts.get("kind"), b.facts.get("kind")}
    if len(kinds) == 1:
        return _fact_cost(a, b)
    return _OTHER_KIND + _fact_cost(a, b) if kinds <= _MIXERS else _NEVER


def _fact_cost(a: Place, b: Place) -> float:
    return min(_MOST_FACTS, _FACT * len(differing(a.facts, b.facts)))


class _Remembered:
    """A cost by the facts of its places: most blocks of a model are alike."""

    def __init__(self, cost: Cost) -> None:
        self._cost, self._known, self._keys = cost, dict[tuple[int, int], float](), dict[str, int]()

    def __call__(self, a: Place, b: Place) -> float:
        key = self._key(a), self._key(b)
        if key not in self._known:
            self._known[key] = self._cost(a, b)
        return self._known[key]

    def _key(self, place: Place) -> int:
        known = [{k: v for k, v in each.facts.items() if k in FACTS} for each in (place, *place.parts)]
        words = repr(known)
        return self._keys.setdefault(words, len(self._keys))


def _aligned(
    a: Sequence[Place], b: Sequence[Place], cost: Cost, gap: Callable[[Place], float]
) -> list[tuple[Place | None, Place | None]]:
    """The cheapest sequence of pairs and gaps; of equals, the one whose gaps come last."""
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        best[i + 1][0] = best[i][0] + gap(x)
    for j, y in enumerate(b):
        best[0][j + 1] = best[0][j] + gap(y)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best[i + 1][j + 1] = min(
                best[i][j] + cost(x, y), best[i][j + 1] + gap(x), best[i + 1][j] + gap(y)
            )
    found: list[tuple[Place | None, Place | None]] = []
    i, j = len(a), len(b)
    while i or j:
        here = best[i][j] - 1e-9
        if i and best[i - 1][j] + gap(a[i - 1]) <= here + 2e-9:
            i -= 1
            found.append((a[i], None))
        elif j and best[i][j - 1] + gap(b[j - 1]) <= here + 2e-9:
            j -= 1
            found.append((None, b[j]))
        else:
            i, j = i - 1, j - 1
            found.append((a[i], b[j]))
    return found[::-1]


def regrouped(stack: Place, like: Place) -> Place:
    """`stack` with its blocks joined to the usual block of `like`, where its own are parts of that.

    The same layers may be written as blocks of two branches or as a flat list of sublayers.
    """
    usual = _usual(like)
    if len(usual) < 2 or len(_usual(stack)) >= len(usual):
        return stack
    blocks: list[Place] = []
    waiting: list[Place] = []
    for block in stack.parts:
        waiting.append(block)
        kinds = _kinds(waiting)
        if kinds == usual:
            blocks.append(_joined(waiting))
            waiting = []
        elif kinds != usual[: len(kinds)]:
            blocks += waiting
            waiting = []
    return Place(stack.level, stack.name, stack.facts, (*blocks, *waiting))


def _usual(stack: Place) -> tuple[str, ...]:
    """Kinds of the branches of most blocks."""
    counts = Counter(_kinds([block]) for block in stack.parts)
    return counts.most_common(1)[0][0] if counts else ()


def _kinds(blocks: Sequence[Place]) -> tuple[str, ...]:
    return tuple(str(branch.facts.get("kind")) for block in blocks for branch in block.parts)


def _joined(blocks: Sequence[Place]) -> Place:
    if len(blocks) == 1:
        return blocks[0]
    branches = tuple(branch for block in blocks for branch in block.parts)
    return Place("block", " + ".join(block.name for block in blocks), {"parallel": False}, branches)
