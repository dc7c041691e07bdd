"""A stack of trials: K replicas that share a shape, stepped together."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state

from normscope.nn.tensors import tensors_of
from normscope.train.config import TrialConfig
from normscope.train.schedule import rate_factor
from normscope.train.stack_forward import LossOf, StackedLoss, stack_batches
from normscope.train.stack_optim import StackedOptimizer
from normscope.train.stackable import unlike


class TrialStack:
    """K trials that share a shape, each with its own weights, batches, rate, warm-up, decay and clipping.

    A step costs less than K lone ones where the operations are small: one call of each does all replicas.
    Each replica follows a lone `Trial` up to rounding, whatever its neighbours do. Dropout draws for each
    replica alone, but not what a lone trial would draw, and its draws depend on the size of the stack; the
    caller seeds the global generators, as for a trial.

    The models stay usable: their parameters and buffers are views of the stack, so that a look between two
    steps sees what has been trained. Their `.grad` is not filled, see `share_gradients`.

    Args:
        models: stepped in place; alike but for their values (`why_not_stackable` and `unlike` say why not).
        batches: what each trains on; must not end.
        loss: scalar of (model, batch); must call the model that it is handed.
        configs: of each; optimiser and accumulation are the same in all.

    Attributes:
        models: as given.
        live: the replicas that are still stepped, ascending.
        losses: of each replica, the loss of each step taken, before the step.
        step: steps taken.
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
        self.models, self._batches, self.configs = list(models), list(batches), list(configs)
        self.live = list(range(len(models)))
        self.losses: list[list[float]] = [[] for _ in models]
        self.step = 0
        self._loss = StackedLoss(models[0], loss)
        self._parameters, self._buffers = stack_module_state(self.models)
        self._optimizer = StackedOptimizer(self._parameters, self.models, self.configs)
        self._hand_out()

    def advance(self) -> list[float]:
        """One step of the live replicas; their losses before it, in the order of `live` at the call.

        A replica whose loss is not finite is not stepped on, keeps its weights, and is live no more.
        """
        if not self.live:
            return []
        stepped = list(self.live)
        losses = self._backward()
        for k, loss in zip(stepped, losses, strict=True):
            self.losses[k].append(loss)
        self._keep([k for k, loss in zip(stepped, losses, strict=True) if math.isfinite(loss)])
        if self.live:
            self._optimizer.step([rate_factor(self.configs[k], self.step) for k in self.live])
            self._after_step()
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
        row = self.live.index(k)
        for name, parameter in self.models[k].named_parameters():
            stacked = self._parameters[name].grad
            parameter.grad = None if stacked is None else stacked[row]

    def _backward(self) -> list[float]:
        """Fill the stacked gradients; each live replica's loss, the mean over the accumulated batches."""
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

    def _after_step(self) -> None:
        """Call the models' `after_step`, which for nGPT puts the matrices back onto the sphere."""
        for k in self.live:
            after_step = getattr(self.models[k], "after_step", None)
            if callable(after_step):
                after_step()


def _rows(parameter: Tensor, rows: Tensor) -> Tensor:
    """Select `rows` of a stacked parameter and of its gradient."""
    kept = parameter.detach()[rows].requires_grad_(parameter.requires_grad)
    kept.grad = None if parameter.grad is None else parameter.grad[rows]
    return kept
