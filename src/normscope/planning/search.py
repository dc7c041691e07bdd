"""The search for a plan: choose units by their bytes and cost, measure the step with them, choose again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from normscope.anatomy import named_modules
from normscope.planning.choosing import Moments, cheapest, leanest, options_of
from normscope.planning.recompute import recompute
from normscope.planning.saved import BETWEEN, FIRST, Saved
from normscope.planning.stand_in import num_sequences, with_sequences
from normscope.planning.step import Footprint, MakeOptimizers, Step
from normscope.planning.units import Group, Unit
from normscope.subjects import Subject

Progress = Callable[[str, int, int], None]
TRIES = 8


@dataclass(frozen=True)
class Found:
    """Units that are recomputed, by path, and the step with them."""

    paths: tuple[str, ...]
    footprint: Footprint


Ways = tuple[tuple[str, ...], ...]
"""Choices of units, by path."""


class Misfit(Exception):
    """No choice of units fits.

    Attributes:
        least: the choice with the lowest peak.
        ways: the choices that keep least.
    """

    def __init__(self, least: Found, ways: Ways) -> None:
        super().__init__(least)
        self.least, self.ways = least, ways


def search(
    step: Step, groups: tuple[Group, ...], saved: Saved, base: Footprint, memory: int, progress: Progress
) -> Found:
    """The cheapest choice whose measured peak is at most `memory`.

    A choice is made by a model of the backward pass, see `Moments`, and measured. If its peak is too high,
    the model is given less room, and if room is left over, more.

    Raises:
        Misfit: none was found.
    """
    if base.peak <= memory:
        return Found((), base)
    moments = moments_of(step, groups, saved, base)
    room = memory - sum(base.stays.values())
    tried: dict[tuple[str, ...], Found] = {}
    for attempt in range(TRIES):
        chosen = cheapest(moments, room)
        if chosen is None:
            break
        paths = tuple(unit.path for option in chosen for unit in option.units)
        if paths in tried:
            break
        progress("choosing", attempt, TRIES)
        tried[paths] = measured(step, groups, paths)
        room += memory - tried[paths].footprint.peak
    ways = leanest_ways(groups, moments, saved)
    if all(found.footprint.peak > memory for found in tried.values()):
        progress("choosing", TRIES - 1, TRIES)
        tried |= {way: measured(step, groups, way) for way in ways if way not in tried}
    fitting = [found for found in tried.values() if found.footprint.peak <= memory]
    if not fitting:
        raise Misfit(min([Found((), base), *tried.values()], key=lambda each: each.footprint.peak), ways)
    return min(fitting, key=lambda each: each.footprint.work.cost)


def moments_of(step: Step, groups: tuple[Group, ...], saved: Saved, base: Footprint) -> Moments:
    """The moments of the backward pass; the one of the loss is what the peak takes beside the blocks."""
    at, modules = saved.bytes_at(), dict(named_modules(step.subject.model))
    before = sum(count for place, count in at.items() if place in (FIRST, BETWEEN))
    in_blocks = sum(count for place, count in at.items() if isinstance(place, Unit))
    return Moments(
        menus=tuple(options_of(group, saved) for group in groups),
        gradients=tuple(_arrived(modules[group.block.path], saved) for group in groups),
        before=before,
        loss=max(0, base.peak - sum(base.stays.values()) - before - in_blocks),
    )


def _arrived(block: nn.Module, saved: Saved) -> int:
    return min((saved.arrived[id(p)] for p in block.parameters() if id(p) in saved.arrived), default=0)


def measured(step: Step, groups: tuple[Group, ...], paths: Sequence[str]) -> Found:
    """The step with these modules recomputed."""
    with recompute(step.subject.model, paths):
        return Found(tuple(paths), step.measure(groups))


def leanest_ways(groups: tuple[Group, ...], moments: Moments, saved: Saved) -> Ways:
    """The choices that keep least: by the model of the moments, all blocks, and all parts of all blocks."""
    by_model = tuple(unit.path for option in leanest(moments) for unit in option.units)
    blocks = tuple(group.block.path for group in groups if group.block not in saved.unsafe)
    parts = tuple(part.path for group in groups for part in group.parts if part not in saved.unsafe)
    return tuple(dict.fromkeys(way for way in (by_model, blocks, parts) if way))


def most_sequences(
    subject: Subject, make: MakeOptimizers, precision: str, ways: Ways, memory: int
) -> int | None:
    """The most sequences in a batch with which one of `ways` fits, by bisection; None without a batch axis.

    It is less than the batch's own.
    """
    fits, fails = 0, num_sequences(subject)
    if fails is None:
        return None
    while fails - fits > 1:
        middle = (fits + fails) // 2
        step = Step(with_sequences(subject, middle), make, precision)
        step.record(())
        if any(measured(step, (), way).footprint.peak <= memory for way in ways):
            fits = middle
        else:
            fails = middle
    return fits
