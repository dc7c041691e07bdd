"""What a claim's function returns: cases, a figure, lines to draw, and what could not be measured."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Case:
    """One place where a sentence was put to the test.

    Attributes:
        seed: what was drawn by it.
        where: the case, in words: "d = 64, ε = 1e-5".
        value: the figure found there.
        holds: whether the sentence is true of it.
        met: whether the sentence's condition is met there.
        part: which sentence, "" for the claim's own.
    """

    seed: int
    where: str
    value: float
    holds: bool
    met: bool = True
    part: str = ""


@dataclass(frozen=True)
class Figure:
    """The number that stands in the table.

    Attributes:
        what: in words, with its unit: "largest relative error", "extra steps, in %".
        by_seed: the figure of each seed.
    """

    what: str
    by_seed: Mapping[int, float]

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
        by_seed: dict[int, float] = {}
        for case in cases:
            if case.part == part:
                by_seed[case.seed] = max(case.value, by_seed.get(case.seed, -math.inf))
        return cls(what, by_seed)

    @classmethod
    def share(cls, what: str, cases: Iterable[Case], part: str = "") -> "Figure":
        """Of the cases of each seed, how many in a hundred the sentence is true of."""
        held: dict[int, list[bool]] = {}
        for case in cases:
            if case.part == part:
                held.setdefault(case.seed, []).append(case.holds)
        return cls(what, {seed: 100 * sum(each) / len(each) for seed, each in held.items()})


@dataclass(frozen=True)
class Line:
    """Points of a plot under one name.

    Attributes:
        name: for the key.
        x, y: the points; what is not finite is left out when drawn.
        low, high: the interval at each point, empty for none.
        marks: whether to draw points alone.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: bool = False

    @classmethod
    def over_seeds(cls, name: str, points: Mapping[float, Sequence[float]], *, marks: bool = False) -> "Line":
        """Median, smallest and largest of the values at each x."""
        xs = sorted(points)
        return cls(
            name,
            xs,
            [statistics.median(points[x]) for x in xs],
            [min(points[x]) for x in xs],
            [max(points[x]) for x in xs],
            marks,
        )


@dataclass(frozen=True)
class Plot:
    """A picture of what was measured.

    Attributes:
        title: what it shows.
        x, y: the axes, with units.
        lines: the data.
        log: which axes are logarithmic: "", "x", "y" or "xy".
        levels: horizontal lines to compare with, by name.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: Literal["", "x", "y", "xy"] = ""
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured.

    Attributes:
        cases: of the claim's sentence and of its parts.
        figure: for the table; None only where nothing could be measured.
        plots: pictures, the first beside the claim.
        notes: sentences with figures in them, none typed in that was not measured here.
        unmeasured: what could not be measured, and why.
        of: of what the share of cases that meet the condition is taken, in words.
        parts_of: the same for parts whose cases are something else, by name.
    """

    cases: Sequence[Case] = ()
    figure: Figure | None = None
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    unmeasured: Sequence[str] = ()
    of: str = "cases"
    parts_of: Mapping[str, str] = field(default_factory=dict)

    def population(self, part: str = "") -> str:
        """What the cases of the claim's own sentence are, or those of a part."""
        return self.parts_of.get(part, self.of)
