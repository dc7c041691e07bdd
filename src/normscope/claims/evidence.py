"""Results of a claim's function: cases, a figure, plots, and what could not be measured."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from normscope.claims.plots import Plot


@dataclass(frozen=True)
class Case:
    """One place where a sentence was tested.

    Attributes:
        seed: the one that it was drawn by; None where nothing is random, so that it is counted once.
        where: the case, in words: "d = 64, ε = 1e-5"; "" puts `at` into words.
        value: the figure found there; where the sentence has a smallest effect, the effect in its favour.
        holds: whether the sentence is true of it.
        part: which sentence, "" for the claim's own.
        met: whether our condition is met there.
        within: whether the text's own hypothesis is met; where it is not, the case does not count.
        at: the case in figures, for code that reads them: {"width": 64}.
        replica: which of the runs of a seed that differ in rounding alone.
        fresh: whether it is from the seeds that confirm a condition; set by `measure_claim`.
    """

    seed: int | None
    where: str
    value: float
    holds: bool
    part: str = ""
    _: KW_ONLY
    met: bool = True
    within: bool = True
    at: Mapping[str, float | str] = field(default_factory=dict)
    replica: int = 0
    fresh: bool = False

    def __post_init__(self) -> None:
        if not self.where:
            object.__setattr__(self, "where", in_words(self.at))

    @classmethod
    def at_most(
        cls, seed: int | None, where: str, value: float, most: float, part: str = "", **more: Any
    ) -> "Case":
        """A case that holds where its value is `most` or less; `more` as in `Case`."""
        return cls(seed, where, value, value <= most, part, **more)

    @classmethod
    def at_least(
        cls, seed: int | None, where: str, value: float, least: float, part: str = "", **more: Any
    ) -> "Case":
        """A case that holds where its value is `least` or more; `more` as in `Case`."""
        return cls(seed, where, value, value >= least, part, **more)


def in_words(at: Mapping[str, float | str]) -> str:
    """`layernorm, width 64`: text as it is, numbers after their key."""
    return ", ".join(value if isinstance(value, str) else f"{key} {value:g}" for key, value in at.items())


def effect(seed: int, where: str, value: float, *, part: str = "", most: float = 3.0) -> Case:
    """A paired effect; larger ones count as `most`, so that a run that diverges leaves the mean finite.

    `measure_claim` sets `holds`, by the smallest effect that counts for the sentence.
    """
    value = 0.0 if math.isnan(value) else max(-most, min(most, value))
    return Case(seed, where, value, holds=False, part=part)


@dataclass(frozen=True)
class Figure:
    """The number that stands in the table.

    Attributes:
        what: in words, with its unit: "largest relative error", "extra steps, in %".
        by_seed: the figure of each seed; that of None is of all, since nothing in it is random.
    """

    what: str
    by_seed: Mapping[int, float] | Mapping[None, float] | Mapping[int | None, float]

    def __post_init__(self) -> None:
        assert self.by_seed, "a figure of no seed"

    @property
    def value(self) -> float:
        """The median over seeds."""
        return statistics.median(self.by_seed.values())

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.by_seed.values())

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.by_seed.values())

    @classmethod
    def largest(cls, what: str, cases: Iterable[Case], part: str = "") -> "Figure":
        """The largest value of the cases of each seed."""
        return cls(what, {seed: max(case.value for case in its) for seed, its in _by_seed(cases, part)})

    @classmethod
    def smallest(cls, what: str, cases: Iterable[Case], part: str = "") -> "Figure":
        """The smallest value of the cases of each seed."""
        return cls(what, {seed: min(case.value for case in its) for seed, its in _by_seed(cases, part)})

    @classmethod
    def share(cls, what: str, cases: Iterable[Case], part: str = "") -> "Figure":
        """Per cent of each seed's cases for which the sentence is true."""
        found = _by_seed(cases, part)
        return cls(what, {seed: 100 * sum(case.holds for case in its) / len(its) for seed, its in found})


def _by_seed(cases: Iterable[Case], part: str) -> Iterable[tuple[int | None, list[Case]]]:
    """The cases of a part that count, by seed."""
    found: dict[int | None, list[Case]] = {}
    for case in cases:
        if case.part == part and case.within:
            found.setdefault(case.seed, []).append(case)
    return found.items()


@dataclass(frozen=True)
class Evidence:
    """Everything that one claim measured.

    Attributes:
        cases: of the claim's sentence and of its parts.
        figure: for the table; None only where nothing could be measured.
        plots: pictures, the first beside the claim.
        notes: sentences with figures in them, none typed in that was not measured here.
        unmeasured: what could not be measured, and why.
    """

    cases: Sequence[Case] = ()
    figure: Figure | None = None
    _: KW_ONLY
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    unmeasured: Sequence[str] = ()
