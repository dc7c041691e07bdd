"""A stack of trials: K replicas that share a shape, stepped together."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state

from normscope.nn.tensors import tensors_of
from normscope.train.config import TrialConfig
from normscope.train.many import LoneTrials, Trials
from normscope.train.schedule import rate_factor
from normscope.train.stack_forward import LossOf, StackedLoss, stack_batches
from normscope.train.stack_optim import StackedOptimizer
from normscope.train.stackable import unlike, why_not_stackable
from normscope.train.trial import after_step


class TrialStack(Trials):
    """K trials that share a shape, each with its own weights, batches, rate, warm-up, decay and clipping.

    A step costs less than K lone ones where the operations are small: one call of each does all replicas.
    Each replica follows a lone `Trial` up to rounding, whatever its neighbours do. Dropout draws for each
    replica alone, but not what a lone trial would draw, and its draws depend on the size of the stack; the
    caller seeds the global generators, as for a trial.

    The models stay usable: their parameters and buffers are views of the stack, so that a look between two
    steps sees what has been trained. Their `.grad` is not filled, see `share_gradients`.

    Args:
        models: stepped in place; alike but for their values (`why_not_stackable` and `unlike` say why not).
        batches: batches of each; must not end.
        loss: scalar of (model, batch); must call the model that it is handed.
        configs: settings of each; optimiser and accumulation are the same in all.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Sequence[Iterator[Any]],
        loss: LossOf,
        configs: Sequence[TrialConfig],
    ) -> None:
        assert len(models) == len(batches) == len(configs) > 0, "one of each a replica"
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
        """Each live replica's loss, the mean over the accumulated batches; gradients are stacked."""
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
        return means.tolist()

    def _update(self) -> None:
        self._optimizer.step([rate_factor(self.configs[k], self.step) for k in self.live])
        for k in self.live:
            after_step(self.models[k])

    def _keep(self, live: list[int]) -> None:
        """Shrink the stack to `live`; those that leave keep weights of their own."""
        if live == self.live:
            return
        gone = [k for k in self.live if k not in live]
        device = next(iter(self._parameters.values())).device
        rows = torch.tensor([self.live.index(k) for k in live], dtype=torch.long, device=device)
        for k in gone:  # a view would keep all of the old stack in memory
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
    """True if batches have the same form."""
    try:
        stack_batches(batches)
    except ValueError:
        return False
    return True
