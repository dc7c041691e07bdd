"""Differences between two aligned structures, one for all the sites at which it occurs."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from normscope.compare.facts import FACTS, MADE_UP_FOR, differing, in_words, name_of, sentence
from normscope.compare.outcome import Outcome
from normscope.compare.places import Rows, Spot
from normscope.compare.types import Difference, Pair, Part, Place

Site = tuple[str | None, str | None]


def compare_structures(rows: Pair) -> tuple[Difference, ...]:
    """Differences between two aligned structures, in the order of the forward; one for many sites.

    A fact that differs in the same way at several places is one difference.
    """
    found: dict[tuple[Any, ...], tuple[Any, list[Site]]] = {}
    for key, values, site in _differences(rows):
        found.setdefault(key, (values, []))[1].append(site)
    return tuple(_difference(key, values, sites) for key, (values, sites) in found.items())


def _differences(pair: Pair) -> Iterator[tuple[tuple[Any, ...], tuple[Any, Any], Site]]:
    """(key, values, site) of every difference at or inside of a pair."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        here = a or b
        assert here is not None, "one of the two exists"
        key = (here.level, here.facts.get("kind"), a is None)
        yield key, (None, None), (a.name if a else None, b.name if b else None)
        return
    facts = differing(a.facts, b.facts)
    late = [fact for fact in facts if FACTS[fact].is_late]
    for fact in facts:
        if fact not in late:
            yield _of_fact(fact, a, b)
    for part in pair.parts:
        yield from _differences(part)
    for fact in late:
        yield _of_fact(fact, a, b)


def _of_fact(fact: str, a: Place, b: Place) -> tuple[tuple[Any, ...], tuple[Any, Any], Site]:
    values = a.facts[fact], b.facts[fact]
    return (fact, *(in_words(fact, value) for value in values)), values, (a.name, b.name)


def _difference(key: tuple[Any, ...], values: tuple[Any, Any], sites: list[Site]) -> Difference:
    if key[0] in FACTS:
        fact = key[0]
        return Difference(Part.STRUCTURE, name_of(fact), tuple(sites), *values, sentence(fact, *values))
    level, kind, only_b = key
    name, number = {"block": "blocks"}.get(level, level), len(sites)
    one, many = {"branch": (f"{kind} branch", f"{kind} branches")}.get(level, (level, f"{level}s"))
    has, lacks = ("B", "A") if only_b else ("A", "B")
    words = f"{has} has {number} {one if number == 1 else many} that {lacks} lacks."
    a, b = (None, number) if only_b else (number, None)
    return Difference(Part.STRUCTURE, name, tuple(sites), a, b, words)


def settled_by(
    function: Outcome, found: Sequence[Difference], rows: Pair
) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """The differences that the function part leaves, and notes on those that it settles.

    What it settles is read in one model and not in the other, or written in another way, at a place where the
    two compute the same.
    """
    places = Rows(rows)
    apart = {_row(spot) for each in function.differences for spot in places.spots(each)}
    kept, notes = [], []
    for each in found:
        is_near = not apart.isdisjoint(map(_row, places.spots(each)))
        if is_near or each.name not in function.settled:
            kept.append(each)
        else:
            where = places.fold(each)
            same = f"The two compute the same in {where}, whatever their weights"
            notes.append(f"{same}, but their code is read differently: {each.message}")
    return tuple(kept), tuple(notes)


def _row(spot: Spot) -> tuple[int, int] | None:
    """The row of a place; None outside of the blocks."""
    return None if spot.stack is None or spot.row is None else (spot.stack, spot.row)


def made_up_for(
    found: Sequence[Difference], apart: Collection[str]
) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """The differences without those that given weights make up for, and notes on these.

    Args:
        found: differences of the structure.
        apart: names of the differences that account for all that the two compute.
    """
    kept = tuple(each for each in found if each.name not in MADE_UP_FOR or each.name in apart)
    notes = (
        f"{each.message} The weights make up for it: it is no difference of the functions."
        for each in found
        if each not in kept
    )
    return kept, tuple(notes)
