"""Learning-rate range test: one run whose learning rate grows until its loss diverges (arXiv:1506.01186).

Smith raises the learning rate linearly over epochs. The form that is in use, here that of pytorch-lr-finder,
raises it exponentially to 10 over 100 steps, and smooths the loss. The loss has diverged when it is 5 times
the lowest, or not finite. The distance to that learning rate is a measure for all learning rates of a ladder,
and the risk of divergence uses it, see `divergence`. A shorter test smooths over the same share of its steps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from normscope.subjects import Subject, untouched
from normscope.train import Recipe, Trial, endless, in_flushed_thread, working_copy

LAST = 10.0
"""Learning rate of the last step."""
SMOOTHING, DIVERGED = 5.0, 5.0
"""Weight of a loss in its smoothed one, times the steps; multiple of the lowest that has diverged."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RampPlan:
    """Learning rate of the first step, and number of steps, of a range test."""

    first: float
    steps: int


PUBLISHED, SHORT = RampPlan(1e-7, 100), RampPlan(1e-4, 30)
"""The test of fastai and pytorch-lr-finder, and the one in the risk of divergence."""


@dataclass(frozen=True)
class Ramp:
    """Learning rates and smoothed losses of the steps before the loss diverged.

    Attributes:
        rates, losses: of the steps before.
        diverged: learning rate at which the loss diverged; the last one where it did not.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: float

    @property
    def turns(self) -> float:
        """Learning rate at which the smoothed loss is lowest."""
        return min(zip(self.losses, self.rates, strict=True))[1]


def ramp(loss_and_step: Callable[[float], float], test: RampPlan = PUBLISHED) -> Ramp:
    """Run the test; `loss_and_step(rate)` gives the loss before the step that it takes at `rate`."""
    weight = SMOOTHING / test.steps
    rates: list[float] = []
    losses: list[float] = []
    for i in range(test.steps):
        rate = test.first * (LAST / test.first) ** (i / (test.steps - 1))
        loss = loss_and_step(rate)
        smooth = weight * loss + (1 - weight) * losses[-1] if losses else loss
        if not math.isfinite(smooth) or (losses and smooth > DIVERGED * min(losses)):
            return Ramp(tuple(rates or [rate]), tuple(losses or [math.inf]), rate)
        rates.append(rate)
        losses.append(smooth)
    return Ramp(tuple(rates), tuple(losses), rates[-1])


def range_test(
    subject: Subject, recipe: Recipe, progress: Progress | None = None, *, test: RampPlan = SHORT
) -> Ramp | None:
    """The range test of a copy of the model, with the optimiser of `recipe` and without a warm-up.

    A model given in eval mode trains in train mode. A model whose copy does not learn is trained itself, and
    restored.

    Args:
        progress: called as `progress(step, steps)` before each step.
        test: the first learning rate and the steps.

    Returns:
        None if no parameter gets a gradient.
    """
    told = progress or (lambda step, steps: None)
    with untouched(subject.model):
        for in_place in (False, True):
            found = in_flushed_thread(functools.partial(_run, subject, recipe, test, told, in_place))
            if found is not None:
                return found
    return None


def _run(
    subject: Subject,
    recipe: Recipe,
    test: RampPlan,
    progress: Progress,
    in_place: bool,
    checkpoint: Callable[[], None],
) -> Ramp | None:
    """The ramp; None if no parameter gets a gradient in its first step."""
    unit = dataclasses.replace(recipe.at_start().with_warmup(0), lr=1.0)
    unit = dataclasses.replace(unit, schedule="constant", decay_steps=None, run_steps=None)
    with working_copy(subject.model, in_place=in_place) as model:
        if not subject.model.training:
            model.train()
        torch.manual_seed(recipe.seed)
        trial = Trial(model, endless(subject.batches), lambda model, batch: subject.loss(batch, model), unit)
        wanted = 0.0

        def scale(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                if "lr" in group:  # a few optimizers have none
                    group["lr"] = group["lr"] * wanted

        for optimizer in trial.optimizers:
            optimizer.register_step_pre_hook(scale)

        def step(rate: float) -> float:
            nonlocal wanted
            checkpoint()
            progress(trial.step, test.steps)
            wanted = rate
            loss = trial.advance()
            if trial.step == 1 and math.isfinite(loss) and all(p.grad is None for p in model.parameters()):
                raise _NothingLearnsError
            return loss

        try:
            return ramp(step, test)
        except _NothingLearnsError:
            return None


class _NothingLearnsError(Exception):
    """No parameter gets a gradient."""
