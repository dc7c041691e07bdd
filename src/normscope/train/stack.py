"""A stack of trials: K replicas of the same shape, stepped together."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state

from normscope.nn.tensors import tensors_of
from normscope.train.many import LoneTrials, Trials
from normscope.train.recipe import Recipe
from normscope.train.schedule import rate_factor
from normscope.train.stack_forward import LossOf, StackedLoss, stack_batches
from normscope.train.stack_optim import StackedOptimizer
from normscope.train.stackable import unlike, why_not_stackable
from normscope.train.trial import after_step


class TrialStack(Trials):
    """K trials of the same shape, each with its own weights, batches, learning rate, decay and clipping.

    If operations are small, a step costs less than K single ones, because each call serves all replicas. Each
    replica equals a single `Trial` up to rounding, whatever its neighbours do. Dropout is independent for
    each replica, but differs from a single trial's, and depends on the size of the stack. The caller seeds
    the global generators, as for a trial.

    The models stay usable: their parameters and buffers are views of the stack, so they show the trained
    values between two steps. Their `.grad` is not filled, see `share_gradients`.

    Args:
        models: trained in place; they may differ only in values (see `why_not_stackable` and `unlike`).
        batches: batches of each replica; must not end.
        loss: scalar of (model, batch); must call the model that it is given.
        configs: settings of each replica, with the same optimiser and accumulation in all.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Sequence[Iterator[Any]],
        loss: LossOf,
        configs: Sequence[Recipe],
    ) -> None:
        assert len(models) == len(batches) == len(configs) > 0, "one of each per replica"
        reason = unlike(models, configs)
        if reason is not None:
            raise ValueError(f"these replicas cannot be stacked: {reason}")
        super().__init__(models)
        self._batches, self.configs = list(batches), list(configs)
        self._loss = StackedLoss(models[0], loss)
        self._parameters, self._buffers = stack_module_state(self.models)
        self._optimizer = StackedOptimizer(self._parameters, self.models, self.configs)
        self._hand_out()

    def share_gradients(self, k: int) -> None:
        """See `Trials`."""
        row = self.live.index(k)
        for name, parameter in self.models[k].named_parameters():
            stacked = self._parameters[name].grad
            parameter.grad = None if stacked is None else stacked[row]

    def _backward(self) -> list[float]:
        """Compute each live replica's loss, the mean over accumulated batches, and the stacked gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        num = self.configs[0].accumulation
        means: Tensor | None = None
        with torch.enable_grad():
            for _ in range(num):
                batch = stack_batches([next(self._batches[k]) for k in self.live])
                losses = self._loss(self._parameters, self._buffers, batch) / num
                losses.sum().backward()
                means = losses.detach() if means is None else means + losses.detach()
        assert means is not None
        values: list[float] = means.tolist()
        self._add_norms(values)
        return values

    @torch.no_grad()
    def _add_norms(self, losses: Sequence[float]) -> None:
        """Add the norm of all gradients of each live replica to `gradient_norms`."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            return
        rows = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
        norms = torch.linalg.vector_norm(rows, dim=0).tolist()
        for k, loss, norm in zip(self.live, losses, norms, strict=True):
            self.gradient_norms[k].append(norm if math.isfinite(loss) else math.nan)

    def _update(self) -> None:
        self._optimizer.step([rate_factor(self.configs[k], self.step) for k in self.live])
        for k in self.live:
            after_step(self.models[k])

    def _keep(self, live: list[int]) -> None:
        """Shrink the stack to `live`; the removed replicas keep copies of their weights."""
        if live == self.live:
            return
        gone = [k for k in self.live if k not in live]
        device = next(iter(self._parameters.values())).device
        rows = torch.tensor([self.live.index(k) for k in live], dtype=torch.long, device=device)
        for k in gone:  # a view would keep the whole old stack in memory
            for tensor in tensors_of(self.models[k]).values():
                tensor.data = tensor.data.clone()
        self._parameters = {name: _rows(p, rows) for name, p in self._parameters.items()}
        self._buffers = {name: buffer[rows] for name, buffer in self._buffers.items()}
        self._optimizer.keep(rows, self._parameters)
        self.live = live
        self._hand_out()

    @torch.no_grad()
    def _hand_out(self) -> None:
        """Make the live models' tensors views of the stack."""
        stacked = self._parameters | self._buffers
        for row, k in enumerate(self.live):
            for name, tensor in tensors_of(self.models[k]).items():
                tensor.data = stacked[name].data[row]


def _rows(parameter: Tensor, rows: Tensor) -> Tensor:
    """Select `rows` of a stacked parameter and of its gradient."""
    kept = parameter.detach()[rows].requires_grad_(parameter.requires_grad)
    kept.grad = None if parameter.grad is None else parameter.grad[rows]
    return kept


def many_trials(
    models: Sequence[nn.Module],
    batches: Sequence[Iterator[Any]],
    loss: LossOf,
    configs: Sequence[Recipe],
) -> Trials:
    """The trials as a `TrialStack` if they can be stacked, else as `LoneTrials`, as is a single trial.

    The test uses the first batch of each iterator, which is not lost for training.
    """
    if len(models) < 2 or unlike(models, configs) is not None:
        return LoneTrials(models, batches, loss, configs)
    firsts = [next(feed) for feed in batches]
    batches = [itertools.chain([first], feed) for first, feed in zip(firsts, batches, strict=True)]
    if not _alike(firsts) or why_not_stackable(models[0], firsts[0], loss, configs[0]) is not None:
        return LoneTrials(models, batches, loss, configs)
    return TrialStack(models, batches, loss, configs)


def _alike(batches: Sequence[Any]) -> bool:
    """True if batches have the same form."""
    try:
        stack_batches(batches)
    except ValueError:
        return False
    return True
