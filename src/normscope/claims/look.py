"""`Look`: what a claim's function is given: seeds, how long it may take, and trained runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normscope.claims.runs import Runs
from normscope.maps import Result
from normscope.train import RunConfig

SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Look:
    """How to look.

    Attributes:
        seeds: each gives cases of its own.
        long: the long form: deeper, wider, longer.
        text: what trained claims train on; None is the Python standard library's source.
        runs: where trained runs are kept, so that claims share them; None keeps none.
    """

    seeds: Sequence[int] = SEEDS
    long: bool = False
    text: Path | None = None
    runs: Runs = field(default_factory=Runs)

    def train(self, configs: Sequence[RunConfig]) -> list[Result]:
        """What comes of `configs`, in their order; each is trained once, those of one shape as one stack."""
        text = None if self.text is None else str(self.text)
        return self.runs.of([config.replace(text=text) for config in configs])
