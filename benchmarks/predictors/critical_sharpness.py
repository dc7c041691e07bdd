"""Critical sharpness (Kalra et al. 2026, arXiv:2601.16979): the rate at which a step raises the loss.

η_c = min {η > 0 : L(θ − ηΔθ) > L(θ)} along the optimiser's update Δθ, and λ_c = 2/η_c. The search is that
of the paper and of its code: doubling or halving from a first guess, then bisection until the bounds differ
by a sixteenth; η_c is their mean. A loss that is not finite counts as raised, which their code leaves open.

Read: the source of the paper and the code (facebookresearch/scalable-curvature).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.predictors.setting import Cost, Prediction, Setting, at_start, loss_gradients
from normscope.subjects import Subject
from normscope.train import Recipe, build_optimizers
from normscope.train.trial import after_step

TOLERANCE = 1 / 16
"""Relative distance of the bounds at which the search ends, as in the paper."""

MOST = 60
"""Most doublings or halvings; a loss that never rises gives the last learning rate tried."""


@dataclass(frozen=True)
class Found:
    """Bounds of η_c, and the number of losses that were computed."""

    lower: float
    upper: float
    evaluations: int

    @property
    def rate(self) -> float:
        """η_c."""
        return (self.lower + self.upper) / 2


def critical_rate(loss_at: Callable[[float], float], before: float, guess: float) -> Found:
    """Search for the learning rate from which `loss_at` is above `before`."""

    def rises(rate: float) -> bool:
        loss = loss_at(rate)
        return not loss <= before  # nan too

    up = not rises(guess)
    rate, count = guess, 1
    while count <= MOST:
        rate *= 2 if up else 0.5
        count += 1
        if rises(rate) == up:
            break
    else:
        return Found(rate, rate, count)
    lower, upper = (rate / 2, rate) if up else (rate, 2 * rate)
    while 1 - lower / upper > TOLERANCE:
        middle, count = (lower + upper) / 2, count + 1
        lower, upper = (lower, middle) if rises(middle) else (middle, upper)
    return Found(lower, upper, count)


def critical_sharpness(setting: Setting) -> list[Prediction]:
    """log₂(η/η_c) at the initial weights, on the first batch; the first guess is the middle rate."""
    subject = setting.subject
    with at_start(subject) as model:
        before, weights, gradients = loss_gradients(subject, model)
        start = [w.detach().clone() for w in weights]
        updates = update(model, setting.recipe, weights, gradients)
        found = critical_rate(
            lambda rate: loss_after(subject, model, weights, start, updates, rate),
            before,
            setting.rates[len(setting.rates) // 2],
        )
    scores = tuple(math.log2(rate / found.rate) for rate in setting.rates)
    facts = {"critical sharpness": 2 / found.rate}
    cost = Cost(forwards=found.evaluations, gradients=1)
    return [Prediction("critical sharpness", scores, cost, found.rate, None, facts)]


def update(
    model: nn.Module, recipe: Recipe, weights: list[nn.Parameter], gradients: list[Tensor]
) -> list[Tensor]:
    """Δθ of the optimiser's first step, θ₁ = θ₀ − lr·Δθ, with weight decay; the weights stay."""
    before = [w.detach().clone() for w in weights]
    model.zero_grad(set_to_none=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.detach().clone()
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(weights, recipe.clip)
    for optimizer in build_optimizers(model, replace(recipe, lr=1.0)):
        optimizer.step()
    with torch.no_grad():
        updates = [old - w for old, w in zip(before, weights, strict=True)]
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
    model.zero_grad(set_to_none=True)
    return updates


@torch.no_grad()
def loss_after(
    subject: Subject,
    model: nn.Module,
    weights: list[nn.Parameter],
    start: list[Tensor],
    updates: list[Tensor],
    rate: float,
) -> float:
    """Loss of the fixed batch after a step of this length; the weights stay."""
    try:
        for weight, old, change in zip(weights, start, updates, strict=True):
            weight.copy_(old - rate * change)
        after_step(model)
        return float(subject.loss(model=model))
    finally:
        for weight, old in zip(weights, start, strict=True):
            weight.copy_(old)
