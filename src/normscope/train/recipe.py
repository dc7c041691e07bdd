"""Recipe: what a step of training is, and `Every`, the interval between checkpoints."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

from normscope.checks import SEED, count, number, one_of
from normscope.errors import UsageError
from normscope.subjects import Run
from normscope.train.live import FULL, LiveOptimizers

OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
SCHEDULES = ("constant", "cosine", "wsd")
PRECISIONS = ("float32", "bfloat16", "float16")
ADAM_EPS, ADAM_BETAS = 1e-8, (0.9, 0.999)  # PyTorch's defaults

_DEFAULT = "leave it out for the default"
_BETA = number(lambda value: 0 <= value < 1, "a number from 0, under 1", _DEFAULT, optional=True)
_RULES = {
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
    "run_steps": count(1, "1 or more steps", "leave it out for a run that is much longer", optional=True),
}
_OPTIMIZER, _SCHEDULE = one_of(OPTIMIZERS), one_of(SCHEDULES)
OWN = "own"
"""Schedule of live optimizers as their schedulers or their record set it."""
_OF_ADAM = ("eps", "beta1", "beta2")
_OF_RUN = ("clip", "precision", "accumulation")
_OF_OPTIMIZER = (
    *("optimizer", "warmup", "schedule", "weight_decay", "eps", "beta1", "beta2"),
    *("lr_end", "decay_steps", "run_steps"),
)
_NOT_OF_LIVE = ("weight_decay", "beta1", "beta2")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a step of training, and the number of steps that are tried.

    Attributes:
        optimizer: "adamw", "adam", "sgd" (momentum 0.9) or "muon", see `build_optimizers`; or a user's own,
            see `Recipe.of`.
        lr: learning rate after warm-up. With live optimizers, the largest of their groups; another value
            scales the learning rates of all groups together.
        warmup: steps of linear warm-up, of which the last one has the full rate; 0 is none. With the schedule
            "own", the length that it has, see `LiveOptimizers.warmup`.
        steps: optimiser steps to take; 0 tries nothing.
        seed: seed of the global generators during the trial (dropout).
        weight_decay: weight decay; None takes the optimiser's default.
        schedule: learning rate after the warm-up: "constant", "cosine", or "wsd" (warm-up, stable, decay:
            constant until the last `decay_steps`, then linear); see `rate_factor`. "own", for live optimizers
            only, is their schedulers'.
        clip: largest norm of all gradients together; larger norms are scaled to it. None does not clip.
        precision: "float32" keeps the model's own type; "bfloat16" and "float16" use autocast, the latter
            with loss scaling.
        accumulation: batches per step; the step is on their mean loss.
        eps: Adam's ε; None takes the optimiser's default. With live optimizers, that of every group with
            betas.
        beta1, beta2: Adam's decay rates of the two moments; None takes the optimiser's defaults.
        lr_end: fraction of `lr` that "cosine" and "wsd" reach at the last of `steps`.
        decay_steps: number of steps in the decay of "wsd"; None is a fifth of the run.
        run_steps: steps of the whole run, over which the schedule falls, where only the first `steps` of it
            are tried; None is `steps`.

    Raises:
        UsageError: a value is invalid.
    """

    optimizer: str | LiveOptimizers = "adamw"
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
    run_steps: int | None = None

    def __post_init__(self) -> None:
        live = isinstance(self.optimizer, LiveOptimizers)
        if not live:
            _OPTIMIZER.require("optimizer", self.optimizer)
        if not (live and self.schedule == OWN):
            _SCHEDULE.require("schedule", self.schedule)
        for name, rule in _RULES.items():
            rule.require(_in_words(name), getattr(self, name))
        for name in _NOT_OF_LIVE if live else _OF_ADAM:
            if getattr(self, name) is not None and self.optimizer not in ("adam", "adamw"):
                given = f"{_in_words(name)} with optimizer {self.optimizer_name!r}"
                expected = "the optimizer's own" if live else "adam or adamw"
                raise UsageError(given, expected, f"leave {_in_words(name)} out")
        if self.decay_steps is not None and self.schedule != "wsd":
            given = f"decay steps with schedule {self.schedule!r}"
            raise UsageError(given, "wsd", "leave decay steps out")

    @classmethod
    def of(cls, run: Run, **given: Any) -> "Recipe":
        """The recipe of a user's run: its optimizers and schedule, clipping, precision and accumulation.

        Args:
            run: the live objects, which the recipe refers to and nothing changes. Without an optimizer, the
                optimizer's fields are those of options.
            given: further fields, such as `steps`; they replace the run's.

        Raises:
            UsageError: a value is invalid, see `LiveOptimizers`.
        """
        fields: dict[str, Any] = {"clip": run.clip, "precision": run.precision}
        fields["accumulation"] = run.accumulation
        if run.optimizers:
            live = LiveOptimizers(run.model, run.optimizers, run.schedulers)
            fields |= {"optimizer": live, "lr": live.lr, "warmup": live.warmup, "schedule": OWN}
        return cls(**fields | given)

    @classmethod
    def asked_for(cls, run: Run | None, *, steps: int, seed: int, **options: Any) -> "Recipe":
        """The recipe of a run, or of options; None as an option's value means that it was not given.

        Args:
            run: a user's run, or None. Of its options, only `lr` can be changed: it scales all groups.
            steps, seed: of the trial.
            options: fields of `Recipe`.

        Raises:
            UsageError: an option contradicts the run, or a value is invalid.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if run is None:
            return cls(steps=steps, seed=seed, **given)
        has_own = _OF_RUN + (_OF_OPTIMIZER if run.optimizers else ())
        for name, value in given.items():
            if name in has_own and value != getattr(run, name, None):
                field = {"warmup": "scheduler", "schedule": "scheduler"}.get(name, name)
                field = field if field in (*_OF_RUN, "scheduler") else "optimizer"
                raise UsageError(
                    f"{_in_words(name)} {value!r} together with a Run",
                    f"the Run's own {field}",
                    f"set it there, or leave {name} out",
                )
        return cls.of(run, steps=steps, seed=seed, **given)

    def with_warmup(self, steps: int) -> "Recipe":
        """The same with another linear warm-up; "own" schedules are then constant after it."""
        if steps == self.warmup:
            return self
        schedule = "constant" if self.schedule == OWN else self.schedule
        return dataclasses.replace(self, warmup=steps, schedule=schedule)

    def at_start(self) -> "Recipe":
        """The recipe of a trial of the run's first steps.

        Without `run_steps`, the run is taken to be so much longer that its decay has not begun.
        """
        is_known = self.schedule == OWN or self.run_steps is not None
        return self if is_known else dataclasses.replace(self, schedule="constant", decay_steps=None)

    @property
    def decays(self) -> bool:
        """Whether the schedule is known to fall after its largest rate."""
        if not isinstance(self.optimizer, LiveOptimizers) or self.schedule != OWN:
            return self.schedule != "constant"
        factors = list(self.optimizer.factors())
        largest = max(factors, default=0.0)
        return any(factor < FULL * largest for factor in itertools.dropwhile(largest.__gt__, factors))

    @property
    def adam_eps(self) -> float | None:
        """Adam's ε; the smallest of live optimizers' groups with betas. None where nothing has it."""
        if isinstance(self.optimizer, LiveOptimizers):
            found = self.optimizer.adam_eps
            return found if self.eps is None or found is None else self.eps
        default = ADAM_EPS if self.optimizer in ("adam", "adamw") else None
        return default if self.eps is None else self.eps

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer: "adamw", or the classes of live ones, "Muon + AdamW"."""
        return self.optimizer.name if isinstance(self.optimizer, LiveOptimizers) else self.optimizer


def _in_words(name: str) -> str:
    """A field in an error, which a user may have given as an option: "weight decay"."""
    return "learning rate" if name == "lr" else name.replace("_", " ")


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
