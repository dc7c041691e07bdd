"""TrialConfig: what one trial does, checked when it is made."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from normscope.errors import UsageError, suggest

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
ScheduleName = Literal["constant", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
PrecisionName = Literal["float32", "bfloat16", "float16"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionName)


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How a trial trains.

    Attributes:
        optimizer: "adamw", "adam", "sgd" (momentum 0.9) or "muon", see `build_optimizers`.
        lr: the learning rate after warm-up.
        warmup: steps of linear warm-up; 0 is none.
        steps: optimiser steps to take; 0 tries nothing.
        seed: seed of the global generators while the trial runs (dropout).
        weight_decay: None takes the optimiser's own default.
        schedule: after the warm-up, "constant" or "cosine": to a tenth of the rate at the last of `steps`.
        clip: the largest norm of all gradients together; longer ones are scaled to it. None does not clip.
        precision: "float32" leaves the model's own; "bfloat16" and "float16" autocast to it, the latter with
            the loss scaled.
        accumulation: batches of a step; their mean loss is stepped on.
        eps: Adam's ε; None takes the optimiser's own.

    Raises:
        UsageError: a value that no trial can run with.
    """

    optimizer: str = "adamw"
    lr: float = 3e-4
    warmup: int = 0
    steps: int = 20
    seed: int = 0
    weight_decay: float | None = None
    schedule: str = "constant"
    clip: float | None = None
    precision: str = "float32"
    accumulation: int = 1
    eps: float | None = None

    def __post_init__(self) -> None:
        _require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        _require_one_of("schedule", self.schedule, SCHEDULES)
        _require_one_of("precision", self.precision, PRECISIONS)
        if not (is_number(self.lr) and self.lr > 0):
            raise UsageError(f"learning rate {self.lr!r}", "a positive number", "try 3e-4")
        if not is_count(self.warmup):
            raise UsageError(f"warmup {self.warmup!r}", "0 or more steps", "use 0 for none")
        if not is_count(self.steps):
            raise UsageError(f"steps {self.steps!r}", "0 or more steps", "0 tries nothing")
        if not (is_count(self.seed) and self.seed < 2**63):
            raise UsageError(f"seed {self.seed!r}", "a whole number from 0, under 2^63", "change the seed")
        if not is_count(self.accumulation, least=1):
            raise UsageError(f"accumulation {self.accumulation!r}", "1 or more batches a step", "use 1")
        self._require_optional_numbers()

    def _require_optional_numbers(self) -> None:
        decay, clip, eps = self.weight_decay, self.clip, self.eps
        if decay is not None and not (is_number(decay) and decay >= 0):
            raise UsageError(f"weight decay {decay!r}", "a number from 0", "leave it out for the default")
        if clip is not None and not (is_number(clip) and clip > 0):
            raise UsageError(f"clip {clip!r}", "a positive gradient norm", "leave it out for no clipping")
        if eps is not None and not (is_number(eps) and eps > 0):
            raise UsageError(f"eps {eps!r}", "a positive number", "leave it out for the optimiser's own")
        if eps is not None and self.optimizer not in ("adam", "adamw"):
            raise UsageError(f"eps with optimizer {self.optimizer!r}", "adam or adamw", "leave eps out")


def is_number(value: object) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object, least: int = 0) -> bool:
    """Whether `value` is a whole number from `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        do = suggest(str(value), choices, "choose one of them")
        raise UsageError(f"{name} {value!r}", " | ".join(choices), do)
