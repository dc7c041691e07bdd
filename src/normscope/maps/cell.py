"""Cell and Result: one training run of a map, and its outcome."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normscope.nn.config import DEFAULT_DEPTH
from normscope.subjects.spec import Spec, parse
from normscope.train import RunConfig

OWN = ("lr", "warmup", "seed")
"""Settings in which cells of one shape may differ; these cells can be trained as one stack."""


@dataclass(frozen=True)
class Cell:
    """One run of a map.

    Attributes:
        config: all settings of the run; nothing else affects its result.
    """

    config: RunConfig

    @cached_property
    def key(self) -> str:
        """A hash of the config, the same on every machine."""
        return digest(self.config.identity())

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Settings that all cells of one shape share."""
        return {name: value for name, value in self.config.identity().items() if name not in OWN}

    @cached_property
    def shape(self) -> str:
        """A hash of `shared`."""
        return digest(self.shared)

    @cached_property
    def _spec(self) -> Spec:
        return parse(self.config.model)

    @property
    def scheme(self) -> str:
        """The scheme of an nn: model, else the MODEL itself."""
        return self._spec.options.get("scheme", "pre") if self._spec.kind == "nn" else self.config.model

    @property
    def init(self) -> str | None:
        """The initialisation; None if it is the scheme's own."""
        return self._spec.options.get("init") if self._spec.kind == "nn" else None

    @property
    def depth(self) -> int | None:
        """Number of blocks of an nn: model, else None."""
        return self._spec.options.get("depth", DEFAULT_DEPTH) if self._spec.kind == "nn" else None

    @property
    def lr(self) -> float:
        """The learning rate after warm-up."""
        return self.config.trial.lr

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        return self.config.trial.warmup

    @property
    def seed(self) -> int:
        """Seed of weights and batches."""
        return self.config.trial.seed


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of training a cell.

    Attributes:
        losses: the loss before each step; the last one is not finite if the run diverged.
        unigram_entropy: unigram entropy of the text, in nats.
        verdict: "trains" or "fails", see `normscope.train.trains`; a run that was stopped fails.
        certain_at: the step after which the run was certain to fail; None if it never was.
        certain: the reason for that, in words.
        stopped: whether the run was stopped at that step.
        seconds: the run's share of the time that its stack took, in seconds.
        stack: number of cells that were trained together.
        versions: versions of the software used.
    """

    losses: tuple[float, ...]
    unigram_entropy: float
    verdict: str
    certain_at: int | None
    certain: str | None
    stopped: bool
    seconds: float
    stack: int
    versions: Mapping[str, str]


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
