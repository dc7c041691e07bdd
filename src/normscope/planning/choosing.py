"""Which units to recompute: the cheapest choice that frees a number of bytes.

One option is taken for each block (a multiple-choice knapsack). Blocks are added one at a time to the front of
choices of which none is both cheaper and larger than another. Freed bytes are rounded down to 1/`STEPS` of what
is needed, so that the front stays short; the choice is exact up to that rounding.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from normscope.planning.saved import Saved
from normscope.planning.units import Group, Unit

STEPS = 2000


class Option(NamedTuple):
    """Units of one block to recompute, the bytes that this frees, and its cost, see `Work.cost`."""

    units: tuple[Unit, ...]
    freed: int
    cost: float


NOTHING = Option((), 0, 0.0)


def options_of(group: Group, saved: Saved) -> tuple[Option, ...]:
    """Options of one block, cheapest first: nothing, some of its parts, or all of it.

    An option that frees less than a cheaper one is left out.
    """
    numbers = saved.touched_by(group)
    parts = [part for part in group.parts if saved.freed_by([part], numbers) > 0]
    sets = [group.units[:1], *_subsets(parts)]
    found = [
        Option(units, saved.freed_by(units, numbers), sum(saved.work[unit].cost for unit in units))
        for units in sets
    ]
    return tuple(_undominated([NOTHING, *found]))


def _subsets(parts: Sequence[Unit]) -> Iterable[tuple[Unit, ...]]:
    sizes = range(1, len(parts) + 1)
    return itertools.chain.from_iterable(itertools.combinations(parts, size) for size in sizes)


def _undominated(options: Iterable[Option]) -> list[Option]:
    kept: list[Option] = []
    for option in sorted(options, key=lambda each: (each.cost, -each.freed)):
        if not kept or option.freed > kept[-1].freed:
            kept.append(option)
    return kept


def most(menus: Sequence[Sequence[Option]]) -> int:
    """The most bytes that can be freed."""
    return sum(menu[-1].freed for menu in menus)


def cheapest(menus: Sequence[Sequence[Option]], needed: int) -> list[Option] | None:
    """The cheapest choice of one option a block that frees `needed` bytes, or None if none does.

    Of blocks with equal options, the first are recomputed: in the backward pass, which begins with the last
    blocks, what the others keep is gone when the first run again.
    """
    if needed > most(menus):
        return None
    unit = max(1, needed // STEPS)
    enough = -(-needed // unit)
    front: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for menu in menus:
        front = _with(front, menu, unit, enough)
    if enough not in front:  # only the rounding is in the way
        return [menu[-1] for menu in menus]
    _, picks = front[enough]
    return _first_blocks_first(menus, [menu[pick] for menu, pick in zip(menus, picks, strict=True)])


Front = dict[int, tuple[float, tuple[int, ...]]]
"""Freed bytes, in rounding units → cost, and the option of each block so far."""


def _with(front: Front, menu: Sequence[Option], unit: int, enough: int) -> Front:
    """The front with one block more."""
    wider: Front = {}
    for freed, (cost, picks) in front.items():
        for pick, option in enumerate(menu):
            total, price = min(enough, freed + option.freed // unit), cost + option.cost
            if total not in wider or price < wider[total][0]:
                wider[total] = (price, (*picks, pick))
    kept: Front = {}
    cheapest_so_far = float("inf")
    for total in sorted(wider, reverse=True):
        if wider[total][0] < cheapest_so_far:
            kept[total] = wider[total]
            cheapest_so_far = wider[total][0]
    return kept


def _first_blocks_first(menus: Sequence[Sequence[Option]], chosen: Sequence[Option]) -> list[Option]:
    alike: dict[tuple[tuple[int, float], ...], list[int]] = defaultdict(list)
    for index, menu in enumerate(menus):
        alike[tuple((option.freed, option.cost) for option in menu)].append(index)
    result = list(chosen)
    for indices in alike.values():
        picks = [menus[index].index(chosen[index]) for index in indices]
        for index, pick in zip(indices, sorted(picks, reverse=True), strict=True):
            result[index] = menus[index][pick]
    return result
