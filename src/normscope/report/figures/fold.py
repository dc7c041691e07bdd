"""Runs of identical blocks, each drawn once with the figures of its worst block."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normscope.anatomy import Anatomy
from normscope.report.figures.branches import form
from normscope.report.figures.layout import BlockPlace, Layout, StackPlace, lay_out
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import figure

LEAST = 3
"""Identical neighbours from which on they are folded."""
BRANCH = 34.0
"""Height of a branch of a fold, in pixels."""
WORDS = 46.0
"""Room for the words above and below the block that stands for a fold."""
ROOMY, HEIGHT = 26.0, 300.0
"""Most pixels of a folded block, and those of a whole stack."""
_RANKS = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Fold:
    """Identical blocks that follow each other, and the worst of them.

    Attributes:
        why: the figure that makes it the worst, in words; "" where nothing was measured.
    """

    blocks: tuple[BlockPlace, ...]
    worst: BlockPlace
    why: str

    @property
    def words(self) -> str:
        """One sentence for the page."""
        blocks = f"blocks {self.blocks[0].number}–{self.blocks[-1].number}"
        drawn = f"{len(self.blocks)} identical blocks ({blocks}) are drawn once"
        return (
            f"{drawn}, with the figures of the worst, block {self.worst.number}: {self.why}."
            if self.why
            else f"{drawn}."
        )


def fold_layout(anatomy: Anatomy) -> Layout | None:
    """The depth axis on which runs of identical blocks have room for one; None where there is no such run."""
    runs = [run for stack in anatomy.stacks for run in _runs(stack.blocks)]
    if not runs:
        return None
    depth = max(len(stack.blocks) for stack in anatomy.stacks)
    needed = max((BRANCH * len(run[0].branches) + WORDS) / len(run) for run in runs)
    return lay_out(anatomy, max(needed, min(ROOMY, HEIGHT / depth)))


def folds_of(stack: StackPlace, ledger: Ledger, marks: Mapping[str, str]) -> list[Fold]:
    """The folds of a stack from the input up; `marks`: block site → severity of its worst finding."""
    places = {place.block.site: place for place in stack.blocks}
    found = []
    for run in _runs([place.block for place in stack.blocks]):
        blocks = tuple(places[block.site] for block in run)
        found.append(Fold(blocks, *_worst(blocks, stack, ledger, marks)))
    return found


def _runs(blocks: Sequence) -> list[list]:
    runs = [list(run) for _, run in itertools.groupby(blocks, key=form)]
    return [run for run in runs if len(run) >= LEAST and run[0].branches]


def _worst(
    blocks: Sequence[BlockPlace], stack: StackPlace, ledger: Ledger, marks: Mapping[str, str]
) -> tuple[BlockPlace, str]:
    """The block of the gravest finding that not all share; of several the one whose gradient is most off."""
    ranks = {place.number: _RANKS.get(marks.get(place.block.site, ""), 3) for place in blocks}
    suspects = [place for place in blocks if ranks[place.number] == min(ranks.values())]
    last = stack.blocks[-1].block.site
    if ledger.trial is not None:
        name = f"the gradient of its weights after {ledger.trial.step} steps"
        values = {place.number: ledger.trained(place.block.site) for place in blocks}
        reference = ledger.trained(last)
    else:
        name = "the gradient that arrives on the stream"
        values = {place.number: ledger.scalar("gradient/stream", place.block.site) for place in blocks}
        reference = ledger.scalar("gradient/stream", last)

    def distance(place: BlockPlace) -> float:
        value = values[place.number]
        if value is None or reference is None or not reference > 0:
            return -1.0
        return abs(math.log10(value / reference)) if math.isfinite(value) and value > 0 else math.inf

    worst = max(suspects, key=lambda place: (distance(place), -place.number))
    value = values[worst.number]
    if value is None or distance(worst) < 0:
        return worst, ""
    end = "that of the last block" if ledger.trial is not None else "that after the last block"
    if not math.isfinite(value) or value <= 0 or reference is None:
        return worst, f"{name} is {figure(value, 3)}"
    return worst, f"{name} is {figure(value / reference, 3)} × {end}"
