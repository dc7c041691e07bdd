"""Slots for norms, and places of sublayers in a model."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from normscope.errors import UsageError


class Slot(StrEnum):
    """Position of a norm: after the embedding, before a branch, after it, after the add, or at the end."""

    ENTRY = "entry"
    BRANCH_IN = "branch_in"
    BRANCH_OUT = "branch_out"
    STREAM = "stream"
    FINAL = "final"


class NeedsDepth(Exception):
    """A rule needs the depth, but none was given."""


Kind = Literal["attention", "cross-attention", "feed-forward"]


@dataclass(frozen=True)
class Where:
    """Place of a sublayer in its model; counted from 1, as in the papers.

    Attributes:
        block: 1 … num_blocks.
        depth: number of blocks of the stack; None for a single block.
        kind: kind of the branch.
        index: index of the branch in its block, from 0.
        per_block: branches per block.
        stack: "single", or the half of an encoder–decoder.
        other_depth: number of blocks of the other half.
        base_depth: depth at which the learning rate was tuned, for depth-μP.
        default_depth: depth for the initial weights if none is given.
    """

    block: int
    depth: int | None = None
    kind: Kind = "attention"
    index: int = 0
    per_block: int = 2
    stack: Literal["single", "encoder", "decoder"] = "single"
    other_depth: int | None = None
    base_depth: int = 2
    default_depth: int | None = None

    def __post_init__(self) -> None:
        inside = isinstance(self.block, int) and self.block >= 1
        if not inside or (self.depth is not None and not self.block <= self.depth):
            last = "depth" if self.depth is None else self.depth
            raise UsageError(f"block {self.block!r}", f"a whole number from 1 to {last}", "count from 1")

    @property
    def num_blocks(self) -> int:
        """L; NeedsDepth for a single block, whose L is unknown."""
        if self.depth is None:
            raise NeedsDepth
        return self.depth

    @property
    def num_other_blocks(self) -> int:
        """L of the other half of an encoder–decoder; NeedsDepth if it was not given."""
        if self.other_depth is None:
            raise NeedsDepth
        return self.other_depth

    @property
    def starting(self) -> "Where":
        """The place with the default depth, for the initial weights."""
        return dataclasses.replace(self, depth=self.default_depth if self.depth is None else self.depth)

    @property
    def sublayer(self) -> int:
        """l, 1 … num_sublayers."""
        return (self.block - 1) * self.per_block + self.index + 1

    @property
    def num_sublayers(self) -> int:
        """Branches of the whole stack, 2L without cross-attention."""
        return self.num_blocks * self.per_block


Rule = Callable[[Where], float]
"""A number that may depend on the place, such as DeepNorm's α = (2L)^¼."""


def one(where: Where) -> float:
    """The rule with factor 1."""
    return 1.0


def zero(where: Where) -> float:
    """The rule with factor 0."""
    return 0.0


@dataclass(frozen=True)
class Placement:
    """Slots that hold a norm."""

    slots: frozenset[Slot]

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.slots


def norms_at(*slots: Slot) -> Placement:
    """A placement with norms in `slots` and nowhere else."""
    return Placement(frozenset(slots))
