"""Choice of the units to recompute: the cheapest one, of an option for each block, that fits.

The backward pass goes from the last block to the first. At a block's moment there are: what earlier blocks
keep, the activations of this one (run again if need be), and the gradients of the later ones. Each moment is
one condition on what the blocks before it keep. Blocks are added one at a time, in the order of the forward
pass, to the choices of which none both costs less and keeps less than another (dynamic programming). Kept
bytes are rounded up to 1/`STEPS` of the room, so that there are few choices. The result is the cheapest up to
that rounding, as far as the model of the moments is right. The caller measures it.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normscope.planning.saved import Saved
from normscope.planning.units import Group, Unit

STEPS = 2000


class Option(NamedTuple):
    """Units of one block to recompute.

    Attributes:
        kept: bytes that the block still saves.
        again: bytes of the block's activations at its moment of the backward pass.
        cost: cost of the second run, see `Work.cost`.
    """

    units: tuple[Unit, ...]
    kept: int
    again: int
    cost: float


@dataclass(frozen=True)
class Moments:
    """The backward pass as the choice sees it, in bytes.

    Attributes:
        menus: the options of each block, in the order of the forward pass.
        gradients: for each block, the gradients that are there before its own.
        before: what is saved outside of the blocks and stays until the end of the backward pass.
        loss: what the loss and the logits take, with their gradients, when the backward pass begins.
    """

    menus: tuple[tuple[Option, ...], ...]
    gradients: tuple[int, ...]
    before: int
    loss: int


def options_of(group: Group, saved: Saved) -> tuple[Option, ...]:
    """Options of one block: nothing, some parts, all of it, and all of it with some parts again inside."""
    numbers = saved.first_saved_in(group)
    whole = sum(saved.storages[number].num_bytes for number in numbers)

    def option(units: tuple[Unit, ...], inner: tuple[Unit, ...] = ()) -> Option:
        kept = whole - saved.freed_by(units, numbers)
        running = inner or units
        stays = whole - saved.freed_by(inner, numbers) if inner else kept
        largest = max((saved.freed_by([u], numbers) // max(1, saved.calls[u]) for u in running), default=0)
        cost = sum(saved.work[unit].cost for unit in (*units, *inner))
        return Option((*units, *inner), kept, stays + largest, cost)

    useful = [
        unit for unit in group.units if unit not in saved.unsafe and saved.freed_by([unit], numbers) > 0
    ]
    block, parts = tuple(useful[:1]), tuple(unit for unit in useful if unit != group.block)
    found = [option(())]
    if group.block not in useful:
        return tuple(_undominated([*found, *(option(subset) for subset in _subsets(parts))]))
    found.append(option(block))
    for subset in _subsets(parts):
        found += [option(subset), option(block, subset)]
    return tuple(_undominated(found))


def leanest(moments: Moments) -> list[Option]:
    """The option of each block that keeps least, and of those the one that takes least when it runs again."""
    return [min(menu, key=lambda each: (each.kept, each.again)) for menu in moments.menus]


def _subsets(parts: Sequence[Unit]) -> Iterable[tuple[Unit, ...]]:
    sizes = range(1, len(parts) + 1)
    return itertools.chain.from_iterable(itertools.combinations(parts, size) for size in sizes)


def _undominated(options: Iterable[Option]) -> list[Option]:
    kept: list[Option] = []
    for each in sorted(options, key=lambda each: (each.cost, each.kept, each.again)):
        if not any(other.kept <= each.kept and other.again <= each.again for other in kept):
            kept.append(each)
    return kept


Front = dict[int, tuple[float, tuple[int, ...]]]
"""Kept bytes, in rounding units → cost, and the option of each block so far."""


def cheapest(moments: Moments, room: int) -> list[Option] | None:
    """The cheapest option of each block so that no moment takes more than `room` bytes; None if none fits."""
    if room <= 0:
        return None
    unit = max(1, room // STEPS)
    front: Front = {-(-moments.before // unit): (0.0, ())}
    for menu, gradients in zip(moments.menus, moments.gradients, strict=True):
        front = _with(front, menu, room - gradients, unit)
    ends = [each for kept, each in front.items() if kept * unit + moments.loss <= room]
    if not ends:
        return None
    _, picks = min(ends)
    return [menu[pick] for menu, pick in zip(moments.menus, picks, strict=True)]


def _with(front: Front, menu: Sequence[Option], room: int, unit: int) -> Front:
    """The front with one block more, at whose moment there is `room`."""
    wider: Front = {}
    for kept, (cost, picks) in front.items():
        for pick, option in enumerate(menu):
            total, price = kept - (-option.kept // unit), cost + option.cost
            if kept * unit + option.again <= room and (total not in wider or price < wider[total][0]):
                wider[total] = (price, (*picks, pick))
    pruned: Front = {}
    lowest = float("inf")
    for total in sorted(wider):
        if wider[total][0] < lowest:
            pruned[total] = wider[total]
            lowest = wider[total][0]
    return pruned
