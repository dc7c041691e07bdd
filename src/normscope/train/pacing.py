"""Pacing: a trial's optimizers with their learning rates by step, from options or from a user's schedule."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normscope.train.live import LiveOptimizers
from normscope.train.optim import build_optimizers, require_trainable, set_rate
from normscope.train.recipe import OWN, Recipe
from normscope.train.schedule import rate_factor


class Pacing(ABC):
    """Optimizers of one trial, and the learning rates at which they step.

    Attributes:
        optimizers: in the order in which they step.
    """

    optimizers: list[Optimizer]

    @abstractmethod
    def before(self, step: int) -> None:
        """Set the learning rates of 0-based `step`."""

    @abstractmethod
    def after(self, loss: float) -> None:
        """Finish a step, whose loss was `loss`."""


def pacing(model: nn.Module, recipe: Recipe) -> Pacing:
    """The optimizers that `recipe` asks for on `model`, with their learning rates.

    Raises:
        UsageError: see `build_optimizers`.
        CopyError: see `LiveOptimizers.build`.
    """
    if isinstance(recipe.optimizer, LiveOptimizers):
        return _LivePacing(model, recipe, recipe.optimizer)
    return _OptionPacing(model, recipe)


class _OptionPacing(Pacing):
    """Optimizers from options: every group at the same fraction of its full rate."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.optimizers, self._recipe = build_optimizers(model, recipe), recipe

    def before(self, step: int) -> None:
        set_rate(self.optimizers, rate_factor(self._recipe, step))

    def after(self, loss: float) -> None:
        """Do nothing: the next step sets its own learning rates."""


class _LivePacing(Pacing):
    """Copies of a user's optimizers at their own schedule, scaled where the recipe has another `lr`.

    The scaled learning rates stand in the groups only during the step: schedulers compute the next one from
    the last, and may hold limits of their own. A rate that the optimizer itself changes in its step stays.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, live: LiveOptimizers) -> None:
        require_trainable(model)
        self._made, self._recipe, self._full = live.build(model), recipe, live.full_rates
        self.optimizers = list(self._made.optimizers)
        self._scale = recipe.lr / live.lr if recipe.lr != live.lr else 1.0
        self._unscaled: list[Any] = []
        self._set: list[Any] = []
        if recipe.eps is not None:
            for group in self._made.adam_groups:
                group["eps"] = recipe.eps

    def before(self, step: int) -> None:
        groups, rows = self._made.groups, self._made.rates
        self._unscaled = [group.get("lr", 0.0) for group in groups]
        rates: Sequence[Any] = self._unscaled
        if self._recipe.schedule != OWN:
            factor = rate_factor(self._recipe, step)
            rates = [rate * factor for rate in self._full]
        elif rows:
            rates = rows[min(step, len(rows) - 1)]
        self._set = [rate if self._scale == 1.0 else rate * self._scale for rate in rates]
        for group, rate in zip(groups, self._set, strict=True):
            if "lr" in group:  # a few optimizers have none
                group["lr"] = rate

    def after(self, loss: float) -> None:
        for group, unscaled, rate in zip(self._made.groups, self._unscaled, self._set, strict=True):
            if group.get("lr", rate) is not rate:
                group["lr"] = group["lr"] / self._scale
            elif "lr" in group:
                group["lr"] = unscaled
        self._made.step_schedulers(loss)
