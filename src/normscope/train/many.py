"""Many trials side by side: the interface, and the trials that are stepped one after another."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from normscope.train.config import TrialConfig
from normscope.train.stack_forward import LossOf
from normscope.train.trial import Trial


class Trials(ABC):
    """K trials under training; replica k is `models[k]`, which may be looked at between two steps.

    Attributes:
        models: the replicas, stepped in place.
        live: replicas that are still stepped, ascending; one whose loss is not finite leaves.
        losses: the losses of each replica's steps, each before its step.
        step: number of steps taken.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        self.live = list(range(len(models)))
        self.losses: list[list[float]] = [[] for _ in models]
        self.step = 0

    def advance(self) -> list[float]:
        """One step of the live replicas; their losses before it, in the order of `live` at the call.

        A replica whose loss is not finite is not stepped on, keeps its weights, and is live no more.
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
        """Step replica `k` no more; its model keeps what it has."""
        self._keep([other for other in self.live if other != k])

    def export(self, k: int, model: nn.Module) -> None:
        """Write the weights and buffers of replica `k` into `model`."""
        model.load_state_dict(self.models[k].state_dict())

    def share_gradients(self, k: int) -> None:
        """Let the parameters of live replica `k` show the last step's gradients in `.grad`."""
        assert k in self.live

    @abstractmethod
    def _backward(self) -> list[float]:
        """The losses of the live replicas, with their gradients."""

    @abstractmethod
    def _update(self) -> None:
        """Step the optimisers of the live replicas."""

    def _keep(self, live: list[int]) -> None:
        self.live = live


class LoneTrials(Trials):
    """K trials stepped one after another, as `TrialStack` steps them together. Takes the same arguments."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Sequence[Iterator[Any]],
        loss: LossOf,
        configs: Sequence[TrialConfig],
    ) -> None:
        super().__init__(models)
        replicas = zip(models, batches, configs, strict=True)
        self._trials = [Trial(model, feed, loss, config) for model, feed, config in replicas]

    def _backward(self) -> list[float]:
        return [self._trials[k].advance() for k in self.live]

    def _update(self) -> None:
        """Nothing to do: the trials have stepped, and their gradients are in place."""
