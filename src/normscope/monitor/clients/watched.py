"""Watched run: the monitor of a Trainer's run, begun, stepped and ended by the Trainer's callback."""

import atexit
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normscope.errors import NormscopeError, describe
from normscope.monitor.monitor import Monitor

LOG = logging.getLogger("normscope")


class UnfinishedRun(NormscopeError):
    """A run whose Trainer never called the end of its callbacks."""


class WatchedRun:
    """Monitor of one run after another, with the losses of the step that goes on.

    Args:
        options: arguments of `Monitor` besides the model and the optimizer.

    Attributes:
        monitor: monitor of the run that goes on, or of the last one; None before the first.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._options = options
        self._loss: Tensor | None = None
        self._is_on = self._has_warned = False

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], step: int, planned: int = 0) -> None:
        """Begin a run after `step` steps, of `planned` ones if that is above 0; after some, it is resumed."""
        self.end(UnfinishedRun("training began again before it had ended"))
        known = {"steps": planned if planned > 0 else None} | ({"resume": True} if step else {})
        self.monitor = Monitor(model, optimizers, **(known | self._options), start=step)
        self.monitor.__enter__()
        self._loss, self._is_on = None, True
        atexit.register(self._end_at_exit)

    def differentiates(self, loss: Tensor, scaler: Any = None) -> None:
        """Add a loss whose backward is about to run; its share of the step's, as it is differentiated.

        Args:
            loss: a scalar.
            scaler: the GradScaler that has scaled it.
        """
        if loss.numel() != 1 or self._has_warned:
            return
        try:
            value = loss.detach()
            if self.monitor is not None:
                self.monitor.scaler = scaler
            if scaler is not None:
                value = value / scaler.scale(torch.ones((), device=value.device))
            value = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
            self._loss = value if self._loss is None else self._loss + value
        except Exception as error:  # it never ends the run
            self._warn(f"the loss could not be read ({describe(error)})")

    def step(self) -> None:
        """End a step."""
        if self.monitor is not None and self._is_on:
            if self._loss is None and not self._has_warned:
                self._warn("no backward of a loss was seen")
            self.monitor.step(self._loss)
        self._loss = None

    def _warn(self, what: str) -> None:
        self._loss, self._has_warned = None, True
        LOG.warning("%s: %s", what, NO_LOSS)

    def end(self, error: BaseException | None = None) -> None:
        """End the run, for an error if there is one; nothing where none goes on."""
        if self.monitor is not None and self._is_on:
            self._is_on = False
            atexit.unregister(self._end_at_exit)
            self.monitor.__exit__(None if error is None else type(error), error, None)

    def _end_at_exit(self) -> None:
        """End a run that raised: the Trainer calls no callback then. Python keeps the error that ended it."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.end(error or UnfinishedRun("the process ended before the training did"))


NO_LOSS = (
    "the monitor judges gradients and streams only. The logs of a Trainer are no substitute: its "
    "logging_nan_inf_filter replaces a loss that is not finite by a mean."
)
