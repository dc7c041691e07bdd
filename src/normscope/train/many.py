"""Many trials side by side: stacked where that is possible, else one after another, in one interface."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from normscope.train.config import TrialConfig
from normscope.train.stack import TrialStack
from normscope.train.stack_forward import LossOf, stack_batches
from normscope.train.stackable import unlike, why_not_stackable
from normscope.train.trial import Trial


class Trials(Protocol):
    """K trials under training; replica k is `models[k]`, which may be looked at between two steps.

    Attributes:
        models: the replicas, stepped in place.
        live: those still stepped, ascending; one whose loss is not finite leaves.
        losses: of each replica, the loss of each step taken, before the step.
        step: steps taken.
    """

    models: list[nn.Module]
    live: list[int]
    losses: list[list[float]]
    step: int

    def advance(self) -> list[float]:
        """One step of the live replicas; their losses before it, in the order of `live` at the call."""

    def drop(self, k: int) -> None:
        """Step replica `k` no more; its model keeps what it has."""

    def export(self, k: int, model: nn.Module) -> None:
        """Write the weights and buffers of replica `k` into `model`."""

    def share_gradients(self, k: int) -> None:
        """Let the parameters of live replica `k` show the last step's gradients in `.grad`."""


def many_trials(
    models: Sequence[nn.Module],
    batches: Sequence[Iterator[Any]],
    loss: LossOf,
    configs: Sequence[TrialConfig],
) -> Trials:
    """The trials as a `TrialStack` where they can be stacked, else as `LoneTrials`; a lone one is never.

    Takes the first batch of each iterator for the test, and hands it out again.
    """
    if len(models) < 2 or unlike(models, configs) is not None:
        return LoneTrials(models, batches, loss, configs)
    firsts = [next(feed) for feed in batches]
    batches = [itertools.chain([first], feed) for first, feed in zip(firsts, batches, strict=True)]
    if not _alike(firsts) or why_not_stackable(models[0], firsts[0], loss, configs[0]) is not None:
        return LoneTrials(models, batches, loss, configs)
    return TrialStack(models, batches, loss, configs)


def _alike(batches: Sequence[Any]) -> bool:
    """Whether batches have the same form."""
    try:
        stack_batches(batches)
    except ValueError:
        return False
    return True


class LoneTrials:
    """K trials stepped one after another, as `TrialStack` steps them together. Takes the same arguments."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Sequence[Iterator[Any]],
        loss: LossOf,
        configs: Sequence[TrialConfig],
    ) -> None:
        replicas = zip(models, batches, configs, strict=True)
        self._trials = [Trial(model, feed, loss, config, config.warmup) for model, feed, config in replicas]
        self.models = list(models)
        self.live = list(range(len(models)))
        self.losses = [trial.losses for trial in self._trials]
        self.step = 0

    def advance(self) -> list[float]:
        """One step of the live replicas; their losses before it, in the order of `live` at the call."""
        if not self.live:
            return []
        losses = [self._trials[k].advance() for k in self.live]
        self.live = [k for k, loss in zip(self.live, losses, strict=True) if math.isfinite(loss)]
        self.step += 1
        return losses

    def drop(self, k: int) -> None:
        """Step replica `k` no more; its model keeps what it has."""
        self.live = [other for other in self.live if other != k]

    def export(self, k: int, model: nn.Module) -> None:
        """Write the weights and buffers of replica `k` into `model`."""
        model.load_state_dict(self.models[k].state_dict())

    def share_gradients(self, k: int) -> None:
        """Nothing to do: a lone trial leaves its gradients there."""
        assert k in self.live
