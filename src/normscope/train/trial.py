"""One trial: optimiser steps on a model."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from normscope.train.pacing import Pacing, pacing
from normscope.train.recipe import Recipe


@dataclass
class Trial:
    """A model in training. `advance` takes steps; the model may be read between two calls.

    Attributes:
        model: trained in place, in the mode (train, eval) of each submodule; its method `after_step`, if it
            has one, is called after each optimiser step.
        batches: batches of the next steps; must not end.
        loss: scalar of (model, batch).
        config: optimiser, learning rate, warm-up and schedule, clipping, precision, accumulation.
        observers: each called with the trial after each step.
        shared_loss: maps this process's loss to the loss of all processes that train together.
        keeps_norms: whether `gradient_norms` is recorded, which costs one pass over the gradients.
        step: steps taken.
        losses: loss before each step, the mean over its batches.
        gradient_norms: norm of all gradients of each step together, before clipping; nan if the loss was not
            finite.
    """

    model: nn.Module
    batches: Iterator[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    config: Recipe
    observers: "Sequence[Observer]" = ()
    shared_loss: Callable[[float], float] | None = None
    keeps_norms: bool = False
    step: int = 0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    optimizers: list[Optimizer] = field(init=False)
    scaler: GradScaler | None = field(init=False)
    _pacing: Pacing = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._pacing = pacing(self.bare_model, self.config)
        self.optimizers = self._pacing.optimizers
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device.type
        self.scaler = GradScaler(self._device) if self.config.precision == "float16" else None

    @property
    def bare_model(self) -> nn.Module:
        """The model without DDP's wrapper."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def diverged(self) -> bool:
        """True if the last loss is not a finite number."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    def advance(self) -> float:
        """Take one step and return the loss before it. Gradients stay in `.grad` until the next step.

        If the loss is not finite, it is recorded, but no step is taken and no gradients are left.
        """
        self._forget_gradients()
        self.losses.append(self._differentiated())
        norm = math.nan
        if self.diverged:
            self._forget_gradients()
        else:
            self._pacing.before(self.step)
            norm = self._stepped()
            self._pacing.after(self.losses[-1])
        if self.keeps_norms:
            self.gradient_norms.append(norm)
        self.step += 1
        for observer in self.observers:
            observer(self)
        return self.losses[-1]

    def evaluated(self, batch: Any) -> Tensor:
        """The loss of a batch in the trial's precision."""
        precision = self.config.precision
        if precision == "float32":
            return self.loss(self.model, batch)
        with torch.autocast(self._device, getattr(torch, precision)):
            return self.loss(self.model, batch)

    def _forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _differentiated(self) -> float:
        """Compute the mean loss of the step's batches, and gradients; wait for the device only at the end."""
        losses: list[Tensor] = []
        parts = self.config.accumulation
        for part in range(parts):
            with torch.enable_grad(), self._exchanging(part == parts - 1):
                loss = self.evaluated(next(self.batches))
                losses.append(loss.detach())
                loss = loss if parts == 1 else loss / parts
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        value = sum(map(float, losses))
        value = value if self.shared_loss is None else self.shared_loss(value)
        return value if parts == 1 else value / parts

    def _exchanging(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context in which DDP exchanges gradients only for the last batch of a step."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _stepped(self) -> float:
        """Step every optimiser on unscaled, clipped gradients; skip the step if scaled gradients overflow.

        Returns the norm of all gradients together if `keeps_norms`, else nan; nan too if a gradient is
        sparse, of which PyTorch has no norm.
        """
        scaler = self.scaler
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        norm = None
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self.config.clip is not None or (self.keeps_norms and not any(g.is_sparse for g in gradients)):
            norm = nn.utils.get_total_norm(gradients)
        if self.config.clip is not None and norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.config.clip, norm)
        for optimizer in self.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        after_step(self.bare_model)
        if norm is None or not self.keeps_norms:
            return math.nan
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def after_step(model: nn.Module) -> None:
    """Call the model's `after_step`, which normalises nGPT's matrices."""
    own = getattr(model, "after_step", None)
    if callable(own):
        own()


Observer = Callable[[Trial], None]
"""Callable for after each step; may read everything and must change nothing."""


class UpdateRatio:
    """RMS(update)/RMS(weight) of the weight matrices over the step between `before` and `after`.

    About `SAMPLE` evenly spaced entries of each matrix are used, to avoid a second copy of the model.
    """

    SAMPLE = 4096

    def __init__(self, model: nn.Module) -> None:
        self._matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        self._kept: list[Tensor] = []

    def before(self) -> None:
        """Store the weights."""
        self._kept = [self._sample(p).clone() for p in self._matrices]

    def after(self) -> float | None:
        """Median over the matrices; None without matrices or without a call of `before`."""
        pairs = zip(self._matrices, self._kept, strict=False)
        ratios: Sequence[float] = sorted(
            float((self._sample(p) - old).norm() / old.norm().clamp_min(1e-30)) for p, old in pairs
        )
        self._kept = []
        return ratios[len(ratios) // 2] if ratios else None

    def _sample(self, parameter: Tensor) -> Tensor:
        flat = parameter.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // self.SAMPLE)].float()


def endless(batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The batches of `batches()`, repeated from the start each time they end.

    Raises:
        ValueError: there are no batches.
    """
    while True:
        empty = True
        for batch in batches():
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "the batches are empty: expected at least one batch; give an iterator that yields some"
            )
