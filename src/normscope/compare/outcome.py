"""Outcome: what comparing one part gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normscope.compare.types import Compared, Difference


@dataclass(frozen=True)
class Outcome:
    """The result of one part of a comparison.

    Attributes:
        compared: how far the part was compared, with its result in words.
        differences: in the order of the forward pass; in the function part the first is where they part.
        weights: how the weights were mapped, as plain data for `Diff.weights`; None in the other parts.
        notes: further facts that a reader must know.
        settled: of the function part: names of the differences of structure that the two can have only where
            this part found one, since it accounts for all that they compute, whatever their weights.
        are_given: of the function part: whether both sides hold given weights, which may make up for
            differences of structure.
    """

    compared: Compared
    differences: tuple[Difference, ...] = ()
    weights: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    settled: frozenset[str] = frozenset()
    are_given: bool = False
