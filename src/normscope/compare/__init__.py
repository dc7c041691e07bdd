"""Compare two models: structure, start, recipe, function and verdict."""

from normscope.compare.compare import DiffInterrupted, diff
from normscope.compare.outcome import Outcome
from normscope.compare.types import Compared, Diff, Difference, Pair, Part, Place

__all__ = ["Compared", "Diff", "DiffInterrupted", "Difference", "Outcome", "Pair", "Part", "Place", "diff"]
