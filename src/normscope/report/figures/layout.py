"""Positions in the drawing: one depth axis that the tower, the profiles and the findings share."""

from dataclasses import dataclass

from normscope.anatomy import Anatomy, Block, Branch, Stack

TOP, BOTTOM = 58.0, 44.0
"""Pixels above the last block (final norm, output) and below the first (input)."""


@dataclass(frozen=True)
class BranchPlace:
    """A branch and its band of the axis; `y` is where its figures are drawn."""

    branch: Branch
    top: float
    bottom: float

    @property
    def y(self) -> float:
        """Middle of the band."""
        return (self.top + self.bottom) / 2


@dataclass(frozen=True)
class BlockPlace:
    """A block, its number in its stack, and its band of the axis (output side up)."""

    block: Block
    number: int
    top: float
    bottom: float
    branches: tuple[BranchPlace, ...]


@dataclass(frozen=True)
class StackPlace:
    """A stack, its number, and its blocks from the input up."""

    stack: Stack
    number: int
    blocks: tuple[BlockPlace, ...]
    floor: float

    @property
    def ceiling(self) -> float:
        """Upper end of the last block."""
        return self.blocks[-1].top if self.blocks else self.floor

    @property
    def input_y(self) -> float:
        """Height of the figures of the stream that enters the first block."""
        return self.floor + 14

    @property
    def hidden_y(self) -> float:
        """Height of the figures of the stack's output (after the final norm)."""
        return self.ceiling - 30


@dataclass(frozen=True)
class Layout:
    """The depth axis. All heights are pixels; blocks of all stacks are equally high."""

    stacks: tuple[StackPlace, ...]
    height: float
    block_height: float
    branch_height: float

    @property
    def depth(self) -> int:
        """Blocks of the deepest stack."""
        return max((len(place.blocks) for place in self.stacks), default=0)

    def site_places(self) -> dict[str, tuple[StackPlace, BlockPlace]]:
        """Site of a block, branch, or norm → its place (the first one where a path is shared)."""
        found: dict[str, tuple[StackPlace, BlockPlace]] = {}
        for stack in self.stacks:
            for place in stack.blocks:
                names = [place.block.site, *(b.site for b in place.block.branches)]
                names += [norm.path for b in place.block.branches for norm in b.norms]
                for name in names:
                    found.setdefault(name, (stack, place))
        return found


def lay_out(anatomy: Anatomy, room: float | None = None) -> Layout:
    """The axis of an anatomy: roomy for few blocks, about 1400 pixels for 96, at least two pixels a block.

    Args:
        room: height of a block, where it is not to follow from their number.
    """
    stacks = [stack for stack in anatomy.stacks if stack.blocks]
    depth = max((len(stack.blocks) for stack in stacks), default=0)
    widest = max((len(block.branches) for stack in stacks for block in stack.blocks), default=1) or 1
    total = 1000 + 400 * min(1.0, max(0.0, (depth - 16) / 80))
    if room is None:
        room = max(2.0, min(36.0 * widest + 10, total / depth)) if depth else 0.0
    gap = 8.0 if room >= 50 else 2.0 if room >= 12 else 0.0
    height = TOP + depth * room + BOTTOM
    places = tuple(_stack_place(stack, i, height - BOTTOM, room, gap) for i, stack in enumerate(stacks))
    return Layout(places, height, room, (room - gap) / widest)


def _stack_place(stack: Stack, number: int, floor: float, room: float, gap: float) -> StackPlace:
    blocks = []
    for i, block in enumerate(stack.blocks):
        bottom, share = floor - i * room, (room - gap) / max(1, len(block.branches))
        first = bottom - gap / 2
        branches = tuple(
            BranchPlace(branch, first - (k + 1) * share, first - k * share)
            for k, branch in enumerate(block.branches)
        )
        blocks.append(BlockPlace(block, i, bottom - room, bottom, branches))
    return StackPlace(stack, number, tuple(blocks), floor)
