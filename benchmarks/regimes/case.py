"""One ladder of the regimes, its learning rates, and when a run of it trains."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.regimes.feeds import Feed
from normscope.subjects import Subject, make_subject
from normscope.train import LAST, Recipe

PARTS = ("seen", "held-out", "fresh", "last", "final", "confirm", "confirm-2", "confirm-3")
RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
STEPS = 300
NATS, SHARE = 0.1, 0.1
"""A run trains if its last losses are this far below the loss without the input on the same batches: in nats,
or as a share."""


@dataclass(frozen=True)
class Case:
    """One ladder.

    Attributes:
        regime: its name in `REGIMES`.
        name: unique in its regime.
        build: the model, from the global generator.
        feed: its data.
        optimizer, seed: of the first replica.
        part: "seen" if the rule was set on it; "held-out" if it was fixed before its first forecast; "fresh"
            if it was fixed later than those, before the allocation of steps to rungs was chosen; "last" if
            it was fixed before rates around the largest one were tried again; "final" if it was fixed before
            rates in doubt were tried over a whole run; "confirm" if it was fixed after every rule was, to
            confirm their figures; "confirm-2" for the same when longer trials had come to go on to their end;
            "confirm-3" when losses had come to be compared with the loss without the input on their batches.
        steps: length of a run.
        schedule: of the learning rate over the run, see `Recipe`.
        precision: of a run, see `Recipe`.
    """

    regime: str
    name: str
    build: Callable[[], nn.Module]
    feed: Feed
    optimizer: str
    seed: int
    part: str
    steps: int = STEPS
    schedule: str = "constant"
    precision: str = "float32"

    def subject(self, seed: int) -> Subject:
        """The model and its batches at a seed."""
        torch.manual_seed(seed)
        return make_subject(self.build(), _Again(self.feed.batches, seed), self.feed.loss, spec=self.name)

    def recipe(self, rate: float, seed: int) -> Recipe:
        """The settings of a run at a learning rate."""
        return Recipe(
            optimizer=self.optimizer,
            lr=rate,
            schedule=self.schedule,
            seed=seed,
            steps=self.steps,
            precision=self.precision,
        )

    def own_baseline(self, seed: int) -> float:
        """The best loss without the input on the batches of a run's last losses."""
        last = itertools.islice(self.feed.batches(seed), self.steps - LAST, self.steps)
        return statistics.fmean(map(self.feed.without_input, last))

    def trains(self, last_loss: float, baseline: float) -> bool:
        """Whether a run with this mean of the last losses trains; not if it is nan.

        Args:
            baseline: the best loss without the input on the same batches.
        """
        margin = SHARE * baseline if self.feed.is_regression else NATS
        return last_loss <= baseline - margin


@dataclass(frozen=True)
class _Again:
    """Batches that start again at each iteration."""

    make: Callable[[int], Iterator[Any]]
    seed: int

    def __iter__(self) -> Iterator[Any]:
        return self.make(self.seed)
