"""The search for a plan: choose units by their bytes and cost, measure the step with them, choose again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normscope.anatomy import named_modules
from normscope.planning.choosing import Moments, cheapest, leanest, options_of
from normscope.planning.recompute import recompute
from normscope.planning.saved import BETWEEN, FIRST, Saved
from normscope.planning.stand_in import num_sequences, with_sequences
from normscope.planning.step import Footprint, MakeOptimizers, Step
from normscope.planning.tracker import Held
from normscope.planning.units import Group, Unit
from normscope.planning.work import RUN_AGAIN, Work
from normscope.subjects import Subject

Progress = Callable[[str, int, int], None]
TRIES = 10
CLOSE = 100
"""A choice is close if it leaves at most 1/`CLOSE` of the memory free."""


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
    the model is given less room, and if room is left over, more. `low` and `high` are the bounds of the room
    between which the choices begin to fail.

    Raises:
        Misfit: none was found.
    """
    if base.peak <= memory:
        return Found((), base)
    moments, stays = moments_of(step, groups, saved, base), sum(base.stays.values())
    low, room, high = 0, max(0, memory - stays), base.peak - stays
    tried: dict[tuple[str, ...], Found] = {}
    for attempt in range(TRIES):
        paths = _cheapest_paths(moments, room)
        is_new = paths is not None and paths not in tried
        if paths is not None and is_new:
            progress("choosing", attempt, TRIES)
            tried[paths] = measured(step, groups, saved, paths)
        over = 0 if paths is None else tried[paths].footprint.peak - memory
        low, high = (low, room) if over > 0 else (room, high)
        if paths is not None and -memory // CLOSE <= over <= 0:
            break
        room = room - over if is_new and low < room - over < high else (low + high) // 2
    ways = leanest_ways(groups, moments, saved)
    if all(found.footprint.peak > memory for found in tried.values()):
        progress("choosing", TRIES - 1, TRIES)
        tried |= {way: measured(step, groups, saved, way) for way in ways if way not in tried}
    fitting = [found for found in tried.values() if found.footprint.peak <= memory]
    if not fitting:
        raise Misfit(min([Found((), base), *tried.values()], key=lambda each: each.footprint.peak), ways)
    return min(fitting, key=lambda each: each.footprint.work.cost)


def _cheapest_paths(moments: Moments, room: int) -> tuple[str, ...] | None:
    chosen = cheapest(moments, room)
    return None if chosen is None else tuple(unit.path for option in chosen for unit in option.units)


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


def measured(step: Step, groups: tuple[Group, ...], saved: Saved, paths: Sequence[str]) -> Found:
    """The step with these modules recomputed, with what no operation shows of each second run.

    These are its start, and on a CPU the random generator's state that is kept for it.
    """
    with recompute(step.subject.model, paths):
        footprint = step.measure(groups)
    runs = sum(count for unit, count in saved.calls.items() if unit.path in paths)
    kept = runs * (torch.get_rng_state().nbytes if step.device == "cpu" else 0)
    blocks = footprint.at_peak.get(Held.BLOCKS, 0) + kept
    footprint = replace(
        footprint,
        peak=footprint.peak + kept,
        at_peak=footprint.at_peak | ({Held.BLOCKS: blocks} if blocks else {}),
        work=footprint.work.plus(Work(calls=RUN_AGAIN * runs)),
    )
    return Found(tuple(paths), footprint)


def leanest_ways(groups: tuple[Group, ...], moments: Moments, saved: Saved) -> Ways:
    """The choices that keep least: by the model of the moments, all blocks, and all parts of all blocks."""
    by_model = tuple(unit.path for option in leanest(moments) for unit in option.units)
    blocks = tuple(group.block.path for group in groups if group.block not in saved.unsafe)
    parts = tuple(part.path for group in groups for part in group.parts if part not in saved.unsafe)
    return tuple(dict.fromkeys(way for way in (by_model, blocks, parts) if way))


def most_sequences(
    subject: Subject,
    groups: tuple[Group, ...],
    make: MakeOptimizers,
    precision: str,
    ways: Ways,
    memory: int,
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
        saved = step.record(groups)
        if any(measured(step, groups, saved, way).footprint.peak <= memory for way in ways):
            fits = middle
        else:
            fails = middle
    return fits
