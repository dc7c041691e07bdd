"""The search for a plan: choose units by their bytes and cost, measure the step with them, choose again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normscope.planning.choosing import cheapest, options_of
from normscope.planning.recompute import recompute
from normscope.planning.saved import Saved
from normscope.planning.stand_in import num_sequences, with_sequences
from normscope.planning.step import Footprint, MakeOptimizers, Step
from normscope.planning.units import Group
from normscope.subjects import Subject

Progress = Callable[[str, int, int], None]
TRIES = 8


@dataclass(frozen=True)
class Found:
    """Units that are recomputed, by path, and the step with them."""

    paths: tuple[str, ...]
    footprint: Footprint


class Misfit(Exception):
    """No choice of units fits.

    Attributes:
        least: the choice with the lowest peak.
    """

    def __init__(self, least: Found) -> None:
        super().__init__(least)
        self.least = least


def search(
    step: Step, groups: tuple[Group, ...], saved: Saved, base: Footprint, memory: int, progress: Progress
) -> Found:
    """The cheapest choice whose measured peak is at most `memory`.

    A choice frees what the peak without it lacks. If its measured peak is still too high, because a second run
    of a block brings its activations back, the next choice frees as much more.

    Raises:
        Misfit: none was found.
    """
    if base.peak <= memory:
        return Found((), base)
    menus = [options_of(group, saved) for group in groups]
    needed, least = base.peak - memory, Found((), base)
    for attempt in range(TRIES):
        chosen = cheapest(menus, needed)
        if chosen is None:
            break
        progress("choosing", attempt, TRIES)
        found = measured(step, groups, [unit.path for option in chosen for unit in option.units])
        if found.footprint.peak <= memory:
            return found
        least = min(least, found, key=lambda each: each.footprint.peak)
        needed += found.footprint.peak - memory
    fitting = [each for each in extremes(step, groups) if each.footprint.peak <= memory]
    if fitting:
        return min(fitting, key=lambda each: each.footprint.work.cost)
    raise Misfit(min([least, *extremes(step, groups)], key=lambda each: each.footprint.peak))


def measured(step: Step, groups: tuple[Group, ...], paths: Sequence[str]) -> Found:
    """The step with these modules recomputed."""
    with recompute(step.subject.model, paths):
        return Found(tuple(paths), step.measure(groups))


def extremes(step: Step, groups: tuple[Group, ...]) -> list[Found]:
    """All blocks; all parts of all blocks; and all blocks, with their parts again inside of the second run."""
    blocks = [group.block.path for group in groups]
    parts = [part.path for group in groups for part in group.parts]
    ways = [way for way in (blocks, parts, blocks + parts) if way]
    return [measured(step, groups, way) for way in ways]


def most_sequences(
    subject: Subject, make: MakeOptimizers, precision: str, groups: tuple[Group, ...], memory: int
) -> int | None:
    """The most sequences in a batch with which some choice fits, by bisection; None if the batch has no axis.

    It is less than the batch's own.
    """
    fits, fails = 0, num_sequences(subject)
    if fails is None:
        return None
    while fails - fits > 1:
        middle = (fits + fails) // 2
        step = Step(with_sequences(subject, middle), make, precision)
        step.record(())
        if any(found.footprint.peak <= memory for found in extremes(step, groups)):
            fits = middle
        else:
            fails = middle
    return fits
