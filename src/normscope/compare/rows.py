"""Numbers of the places of B that belong to those of A."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from normscope.anatomy import Anatomy
from normscope.compare.keys import OUTSIDE, At, way_in
from normscope.compare.types import Pair


@dataclass(frozen=True)
class Rows:
    """Which stack, block and branch of B belongs to which of A.

    Attributes:
        to_a: (stack, block, branch) of B → that of A; with -1 for a whole block or stack. Places of B
            without a partner are absent.
    """

    to_a: Mapping[At, At] = field(default_factory=dict)

    @property
    def to_b(self) -> dict[At, At]:
        """The inverse."""
        return {a: b for b, a in self.to_a.items()}


def rows_of(pair: Pair | None, a: Anatomy, b: Anatomy) -> Rows:
    """The places that belong together by the alignment; by position where it does not fit the readings."""
    found = None if pair is None else _aligned(pair)
    if found is not None and _fits(found.to_a.values(), a) and _fits(found.to_a, b) and len(found.to_a) > 1:
        return found
    return _by_position(a, b)


def _fits(places: object, anatomy: Anatomy) -> bool:
    assert hasattr(places, "__iter__")
    for s, i, n in places:
        if s < 0:
            continue
        if s >= len(anatomy.stacks) or i >= len(anatomy.stacks[s].blocks):
            return False
        if n >= 0 and i >= 0 and n >= len(anatomy.stacks[s].blocks[i].branches):
            return False
    return True


def _aligned(model: Pair) -> Rows:
    """The numbers in an alignment: each side counts its own places."""
    to_a: dict[At, At] = {(OUTSIDE, OUTSIDE, OUTSIDE): (OUTSIDE, OUTSIDE, OUTSIDE)}
    stacks = [0, 0]
    for stack in model.parts:
        blocks = [0, 0]
        if stack.a is not None and stack.b is not None:
            to_a[stacks[1], OUTSIDE, OUTSIDE] = (stacks[0], OUTSIDE, OUTSIDE)
            to_a.setdefault(way_in(stacks[1]), way_in(stacks[0]))
        for block in stack.parts:
            branches = [0, 0]
            if block.a is not None and block.b is not None:
                to_a[stacks[1], blocks[1], OUTSIDE] = (stacks[0], blocks[0], OUTSIDE)
            for branch in block.parts:
                if branch.a is not None and branch.b is not None:
                    to_a[stacks[1], blocks[1], branches[1]] = (stacks[0], blocks[0], branches[0])
                _count(branch, branches)
            _count(block, blocks)
        _count(stack, stacks)
    return Rows(to_a)


def _count(pair: Pair, counts: list[int]) -> None:
    counts[0] += pair.a is not None
    counts[1] += pair.b is not None


def _by_position(a: Anatomy, b: Anatomy) -> Rows:
    """Stacks and blocks by number, branches by kind and number."""
    to_a: dict[At, At] = {(OUTSIDE, OUTSIDE, OUTSIDE): (OUTSIDE, OUTSIDE, OUTSIDE)}
    for s, (stack_a, stack_b) in enumerate(zip(a.stacks, b.stacks, strict=False)):
        to_a[s, OUTSIDE, OUTSIDE] = (s, OUTSIDE, OUTSIDE)
        to_a[way_in(s)] = way_in(s)
        for i, (block_a, block_b) in enumerate(zip(stack_a.blocks, stack_b.blocks, strict=False)):
            to_a[s, i, OUTSIDE] = (s, i, OUTSIDE)
            free = list(enumerate(block_a.branches))
            for n, branch in enumerate(block_b.branches):
                same = next((each for each in free if each[1].kind == branch.kind), None)
                if same is not None:
                    free.remove(same)
                    to_a[s, i, n] = (s, i, same[0])
    return Rows(to_a)
