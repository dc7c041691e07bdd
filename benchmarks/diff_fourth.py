"""The set `fourth`: mistakes that were reported in public, in code that is written in many ways."""

from collections.abc import Iterator

from benchmarks import diff_fourth_plants, diff_fourth_recipes
from benchmarks.diff_fourth_base import Pair
from benchmarks.diff_plants import Case


def pairs() -> Iterator[Pair]:
    """The pairs of models."""
    yield from diff_fourth_plants.pairs()


def cases() -> list[Case]:
    """The pairs of models and of recipes, for `diff_runs`."""
    return [*(pair.case() for pair in pairs()), *diff_fourth_recipes.planted()]
