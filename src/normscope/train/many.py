"""Several trials side by side: the interface, and trials that are stepped one after another."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch import nn

from normscope.train.recipe import Recipe
from normscope.train.stack_forward import LossOf
from normscope.train.trial import Trial


class Trials(ABC):
    """K trials in training; replica k is `models[k]`, which may be read between two steps.

    Attributes:
        models: the replicas, trained in place.
        live: replicas that are still trained, in ascending order; a replica whose loss is not finite is
            removed.
        losses: losses of each replica, each before its step.
        gradient_norms: norm of all gradients of each step together, before clipping, of each replica; nan if
            the loss was not finite.
        step: number of steps taken.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        self.live = list(range(len(models)))
        self.losses: list[list[float]] = [[] for _ in models]
        self.gradient_norms: list[list[float]] = [[] for _ in models]
        self.step = 0

    def advance(self) -> list[float]:
        """Take one step of the live replicas; return their losses before it, in the order of `live`.

        A replica whose loss is not finite keeps its weights and is removed from `live`.
        """
        if not self.live:
            return []
        losses = self._backward()
        for k, loss in zip(self.live, losses, strict=True):
            self.losses[k].append(loss)
        self._keep([k for k, loss in zip(self.live, losses, strict=True) if math.isfinite(loss)])
        if self.live:
            self._update()
        self.step += 1
        return losses

    def drop(self, k: int) -> None:
        """Stop training replica `k`; its model keeps its weights."""
        self._keep([other for other in self.live if other != k])

    def export(self, k: int, model: nn.Module) -> None:
        """Write the weights and buffers of replica `k` into `model`."""
        model.load_state_dict(self.models[k].state_dict())

    def share_gradients(self, k: int) -> None:
        """Put the last step's gradients into `.grad` of the parameters of live replica `k`."""
        assert k in self.live

    def is_ahead(self, k: int) -> bool:
        """Whether replica `k` has taken more than `step` steps: its model is not that of this step."""
        return False

    @abstractmethod
    def _backward(self) -> list[float]:
        """Compute the losses and gradients of the live replicas, and add the norms; return the losses."""

    @abstractmethod
    def _update(self) -> None:
        """Step the optimisers of the live replicas."""

    def _keep(self, live: list[int]) -> None:
        self.live = live


class LoneTrials(Trials):
    """K trials that are stepped one after another; takes the arguments of `TrialStack`.

    Attributes:
        trials: the trials, in the order of `models`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Sequence[Iterator[Any]],
        loss: LossOf,
        configs: Sequence[Recipe],
    ) -> None:
        replicas = zip(models, batches, configs, strict=True)
        self._adopt([lone_trial(model, feed, loss, config) for model, feed, config in replicas])

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> Self:
        """Trials that may have taken steps already, made by `lone_trial`.

        The steps are counted from 0 again. A trial that is ahead of them waits, and its recorded losses are
        returned, until the others have caught up.
        """
        made = cls.__new__(cls)
        made._adopt(trials)
        return made

    def _adopt(self, trials: Sequence[Trial]) -> None:
        super().__init__([trial.model for trial in trials])
        self.trials = list(trials)
        self.gradient_norms = [trial.gradient_norms for trial in trials]

    def is_ahead(self, k: int) -> bool:
        return self.trials[k].step > self.step

    def _backward(self) -> list[float]:
        return [
            self.trials[k].losses[self.step] if self.is_ahead(k) else self.trials[k].advance()
            for k in self.live
        ]

    def _update(self) -> None:
        """Do nothing: `_backward` has stepped the trials already."""


def lone_trial(model: nn.Module, batches: Iterator[Any], loss: LossOf, config: Recipe) -> Trial:
    """A trial that records what `Trials` needs."""
    return Trial(model, batches, loss, config, keeps_norms=True)
