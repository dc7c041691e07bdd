"""Recipe: what a step of training is, and `Every`, the interval between checkpoints."""

import math
from dataclasses import dataclass

from normscope.checks import SEED, count, number, one_of
from normscope.errors import UsageError

OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
SCHEDULES = ("constant", "cosine", "wsd")
PRECISIONS = ("float32", "bfloat16", "float16")

_DEFAULT = "leave it out for the default"
_BETA = number(lambda value: 0 <= value < 1, "a number from 0, under 1", _DEFAULT, optional=True)
_RULES = {
    "optimizer": one_of(OPTIMIZERS),
    "schedule": one_of(SCHEDULES),
    "precision": one_of(PRECISIONS),
    "lr": number(lambda value: value > 0, "a positive number", "try 3e-4"),
    "warmup": count(0, "0 or more steps", "use 0 for none"),
    "steps": count(0, "0 or more steps", "use 0 to try nothing"),
    "seed": SEED,
    "accumulation": count(1, "1 or more batches per step", "use 1"),
    "weight_decay": number(lambda value: value >= 0, "a number from 0", _DEFAULT, optional=True),
    "clip": number(
        lambda value: value > 0, "a positive gradient norm", "leave it out for no clipping", optional=True
    ),
    "eps": number(lambda value: value > 0, "a positive number", _DEFAULT, optional=True),
    "beta1": _BETA,
    "beta2": _BETA,
    "lr_end": number(lambda value: 0 <= value <= 1, "a fraction of the learning rate, 0 to 1", "use 0.1"),
    "decay_steps": count(1, "1 or more steps", "leave it out for a fifth of the run", optional=True),
}
_OF_ADAM = ("eps", "beta1", "beta2")
_IN_WORDS = {"lr": "learning rate", "weight_decay": "weight decay"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a step of training, and the number of steps that are tried.

    Attributes:
        optimizer: "adamw", "adam", "sgd" (momentum 0.9) or "muon", see `build_optimizers`.
        lr: learning rate after warm-up.
        warmup: steps of linear warm-up; 0 is none.
        steps: optimiser steps to take; 0 tries nothing.
        seed: seed of the global generators during the trial (dropout).
        weight_decay: weight decay; None takes the optimiser's default.
        schedule: learning rate after the warm-up: "constant", "cosine", or "wsd" (warm-up, stable, decay:
            constant until the last `decay_steps`, then linear); see `rate_factor`.
        clip: largest norm of all gradients together; larger norms are scaled to it. None does not clip.
        precision: "float32" keeps the model's own type; "bfloat16" and "float16" use autocast, the latter
            with loss scaling.
        accumulation: batches per step; the step is on their mean loss.
        eps: Adam's ε; None takes the optimiser's default.
        beta1, beta2: Adam's decay rates of the two moments; None takes the optimiser's defaults.
        lr_end: fraction of `lr` that "cosine" and "wsd" reach at the last of `steps`.
        decay_steps: number of steps in the decay of "wsd"; None is a fifth of `steps`.

    Raises:
        UsageError: a value is invalid.
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
    beta1: float | None = None
    beta2: float | None = None
    lr_end: float = 0.1
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule.require(_IN_WORDS.get(name, name), getattr(self, name))
        for name in _OF_ADAM:
            if getattr(self, name) is not None and self.optimizer not in ("adam", "adamw"):
                given = f"{name} with optimizer {self.optimizer!r}"
                raise UsageError(given, "adam or adamw", f"leave {name} out")
        if self.decay_steps is not None and self.schedule != "wsd":
            given = f"decay_steps with schedule {self.schedule!r}"
            raise UsageError(given, "wsd", "leave decay_steps out")


@dataclass(frozen=True)
class Every:
    """Interval between checkpoints, in steps or in seconds."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> "Every":
        """Parse an interval: "100" is in steps, "60s" in seconds.

        Raises:
            UsageError: the text is neither.
        """
        number = text.removesuffix("s")
        try:
            if number != text and 0 <= float(number) < math.inf:
                return Every(seconds=float(number))
            if number == text and int(number) > 0:
                return Every(steps=int(number))
        except ValueError:
            pass  # the error is raised below
        raise UsageError(f'checkpoint every "{text}"', "steps or seconds", "write 100 or 60s")
