"""TrialConfig: what one trial does, checked when it is made."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from normscope.errors import UsageError, suggest

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How a trial trains.

    Attributes:
        optimizer: "adamw", "adam", "sgd" (momentum 0.9) or "muon", see `build_optimizer`.
        lr: the learning rate after warm-up.
        warmup: steps of linear warm-up; 0 is none.
        steps: optimiser steps to take; 0 tries nothing.
        seed: seed of the global generators while the trial runs (dropout).
        weight_decay: None takes the optimiser's own default.

    Raises:
        UsageError: a value that no trial can run with.
    """

    optimizer: str = "adamw"
    lr: float = 3e-4
    warmup: int = 0
    steps: int = 20
    seed: int = 0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            do = suggest(str(self.optimizer), OPTIMIZERS, "choose one of them")
            raise UsageError(f"optimizer {self.optimizer!r}", " | ".join(OPTIMIZERS), do)
        if not (isinstance(self.lr, int | float) and math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"learning rate {self.lr!r}", "a positive number", "try 3e-4")
        if not _is_count(self.warmup):
            raise UsageError(f"warmup {self.warmup!r}", "0 or more steps", "use 0 for none")
        if not _is_count(self.steps):
            raise UsageError(f"steps {self.steps!r}", "0 or more steps", "the default is 20; 0 tries nothing")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
