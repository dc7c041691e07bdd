"""Learning-rate range test (Smith 2015, arXiv:1506.01186): one run with a growing learning rate.

Smith raises the rate linearly over epochs, and takes the rate at which the accuracy slows or falls as the
largest. The form that is in use raises it exponentially over 100 steps, to 10, and looks at the smoothed
loss. This is that of pytorch-lr-finder: each smoothed loss is 0.05 of the loss and 0.95 of the last
smoothed one, the run ends at 5 times the lowest, and the rate to use is that of the steepest fall. It
starts at 1e-7, as in fastai. The largest rate is where the smoothed loss is lowest, and, as a variant,
where it diverges (5 times the lowest, or the end of the ramp).

Read: summaries and a quotation of the paper's section 3.3; the code of pytorch-lr-finder, and in part that
of fastai 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.predictors.setting import Cost, Prediction, Setting
from normscope.train import build_optimizers, endless, in_flushed_thread, working_copy
from normscope.train.trial import after_step

FIRST, LAST, STEPS = 1e-7, 10.0, 100
SMOOTHING, DIVERGED = 0.05, 5.0
SKIPPED = (10, 5)
"""Steps at the start and the end that are not looked at for the steepest fall, as in pytorch-lr-finder."""


@dataclass(frozen=True)
class Ramp:
    """Learning rates and smoothed losses until the loss diverged; `diverged` is the rate, or the last one."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: float

    @property
    def turns(self) -> float:
        """Rate at which the smoothed loss is lowest."""
        return self.rates[int(np.argmin(self.losses))]

    @property
    def steepest(self) -> float:
        """Rate of the steepest fall of the smoothed loss over log η."""
        first, end = SKIPPED[0], len(self.losses) - SKIPPED[1]
        if end - first < 2:
            return self.turns
        return self.rates[first + int(np.argmin(np.gradient(np.array(self.losses[first:end]))))]


def ramp(loss_and_step: Callable[[float], float], steps: int = STEPS) -> Ramp:
    """Run the test; `loss_and_step(rate)` gives the loss before the step that it takes at `rate`."""
    rates: list[float] = []
    losses: list[float] = []
    for i in range(steps):
        rate = FIRST * (LAST / FIRST) ** (i / (steps - 1))
        loss = loss_and_step(rate)
        smooth = SMOOTHING * loss + (1 - SMOOTHING) * losses[-1] if losses else loss
        if not math.isfinite(smooth) or (losses and smooth > DIVERGED * min(losses)):
            return Ramp(tuple(rates or [rate]), tuple(losses or [math.inf]), rate)
        rates.append(rate)
        losses.append(smooth)
    return Ramp(tuple(rates), tuple(losses), rates[-1])


def range_test(setting: Setting) -> list[Prediction]:
    """log₂ of the learning rate over the test's largest one; the optimiser is the recipe's."""
    found = in_flushed_thread(lambda checkpoint: _run(setting, checkpoint))
    cost = Cost(steps=len(found.rates))
    return [
        _prediction("range test: loss turns", found.turns, found.steepest, setting.rates, cost),
        _prediction("range test: loss diverges", found.diverged, found.steepest, setting.rates, cost),
    ]


def _prediction(name: str, largest: float, best: float, rates: Sequence[float], cost: Cost) -> Prediction:
    return Prediction(name, tuple(math.log2(rate / largest) for rate in rates), cost, largest, best)


def _run(setting: Setting, checkpoint: Callable[[], None]) -> Ramp:
    subject = setting.subject
    batches = endless(subject.batches)
    with working_copy(subject.model) as model:
        model.train()
        torch.manual_seed(setting.recipe.seed)
        optimizers = build_optimizers(model, replace(setting.recipe, lr=1.0))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        full = [group["lr"] for group in groups]

        def step(rate: float) -> float:
            checkpoint()
            for group, factor in zip(groups, full, strict=True):
                group["lr"] = rate * factor
            model.zero_grad(set_to_none=True)
            with torch.enable_grad():
                loss = subject.loss(next(batches), model)
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            after_step(model)
            return float(loss.detach())

        return ramp(step)
