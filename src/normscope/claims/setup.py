"""`Setup`: what a claim's function is given: seeds, short or long form, and trained runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from normscope.claims.evidence import Case
from normscope.claims.runs import Runs
from normscope.maps import Result
from normscope.train import RunConfig

SEEDS = (0, 1, 2, 3, 4)
FRESH_SEEDS = (1000, 1001)
"""Seeds that no condition was found on: they confirm it."""

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Setup:
    """Seeds, form, text and kept runs to measure with.

    Attributes:
        seeds: each gives cases of its own.
        long: the long form: deeper, wider, longer.
        text: what trained claims train on; None is the Python standard library's source.
        runs: where trained runs are kept, so that claims share them; None keeps none.
        fresh: whether this confirms a condition: other seeds, and other sizes where a claim has them.
    """

    seeds: Sequence[int] = SEEDS
    long: bool = False
    text: Path | None = None
    runs: Runs = field(default_factory=Runs)
    fresh: bool = False

    def cases(self, *measures: Callable[[int], Iterable[Case]]) -> list[Case]:
        """The cases that each of `measures` gives for each seed."""
        return [case for seed in self.seeds for measure in measures for case in measure(seed)]

    def by_seed(self, names: Iterable[K], measure: Callable[[K, int], T]) -> dict[K, dict[int, T]]:
        """Results of `measure` by name and seed."""
        return {name: {seed: measure(name, seed) for seed in self.seeds} for name in names}

    def train(self, configs: Sequence[RunConfig], replica: int = 0) -> list[Result]:
        """Results of `configs`, in their order; each is trained once, those of one shape as one stack.

        Args:
            replica: 0 is the run itself; each other number is the same run from weights that are off by 1e-7
                of themselves, which shows what hangs on rounding.
        """
        return self.runs.of([self.on_text(config) for config in configs], replica)

    def on_text(self, config: RunConfig) -> RunConfig:
        """`config` with the text of this setup."""
        return config.replace(text=None if self.text is None else str(self.text))

    def sizes(self, usual: T, held_out: T) -> T:
        """`usual`, or sizes that no condition was found on where one is to be confirmed."""
        return held_out if self.fresh else usual


def flat(found: Mapping[K, Mapping[int, T]]) -> Iterator[tuple[K, int, T]]:
    """Name, seed and value of each value by name and seed."""
    for name, by_seed in found.items():
        for seed, value in by_seed.items():
            yield name, seed, value


def mapped(found: Mapping[K, Mapping[int, T]], change: Callable[[T], R]) -> dict[K, dict[int, R]]:
    """`change` of each value by name and seed."""
    return {name: {seed: change(value) for seed, value in by_seed.items()} for name, by_seed in found.items()}
