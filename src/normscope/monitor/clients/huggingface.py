"""Hugging Face's Trainer, and the trainers of TRL: a callback that watches the run.

The Trainer hands no loss to its callbacks, and its logs replace a loss that is not finite by the running mean
(`logging_nan_inf_filter`). So the callback reads each loss where it is differentiated: while the Trainer
trains, `torch.autograd.backward` and `clip_grad_norm_` are wrapped.
"""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from normscope.monitor.clients.watched import WatchedRun
from normscope.monitor.monitor import EVERY, Monitor
from normscope.recording.calls import bare


class MonitorCallback(TrainerCallback):
    """Callback that watches a Trainer's run with a `Monitor`.

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[MonitorCallback(store="run.db")])
        trainer.train()

    The loss of a step is the sum of what its micro-batches differentiate: what the Trainer logs with
    `logging_steps=1`, in this process, without its filter. The gradients are measured before clipping. A
    run resumed from a checkpoint goes on in its store.

    If the training raises, the Trainer calls no callback: the run is ended at the exit of the interpreter, or
    at once by `with MonitorCallback(…) as callback:` around `trainer.train()`.

    Args:
        store: SQLite file to write, for `normscope watch`.
        every: steps between two looks at all figures.
        options: other arguments of `Monitor`.
    """

    def __init__(self, store: str | Path | None = None, every: int = EVERY, **options: Any) -> None:
        self._run = WatchedRun(store=store, every=every, **options)
        self._is_open = False
        self._scaler: Any = None
        self._wrapped: list[_Wrapped] = []

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the run that goes on, or of the last one; None before the first."""
        return self._run.monitor

    def __enter__(self) -> "MonitorCallback":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to watch."""
        self._unwrap()
        optimizer = given["optimizer"]
        model = _compiled(given["model"]) if args.torch_compile else given["model"]
        self._run.begin(model, [optimizer], state.global_step, state.max_steps)
        self._scaler = getattr(optimizer, "scaler", None)
        clipping = torch.nn.utils
        self._wrapped = [
            _Wrapped(torch.autograd, "backward", self._sees_backward),
            _Wrapped(clipping, "clip_grad_norm_", self._sees_clipping),
            _Wrapped(clipping, "clip_grad_value_", self._sees_clipping),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to add up losses."""
        self._is_open = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the sum of losses."""
        self._is_open = False

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a step."""
        self._is_open = False
        self._run.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the run."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._is_open = False
        self._unwrap()
        self._run.end(error)

    def _unwrap(self) -> None:
        for each in reversed(self._wrapped):
            each.undo()
        self._wrapped = []

    def _sees_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        is_outer = torch._C._current_graph_task_id() == -1
        if self._is_open and is_outer and not self._is_at_work and isinstance(tensors, Tensor):
            self._run.differentiates(tensors, self._scaler)

    def _sees_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self._is_open and self.monitor is not None:
            self.monitor.see_gradients()

    @property
    def _is_at_work(self) -> bool:
        """Whether the monitor itself runs the model."""
        return self.monitor is not None and self.monitor.is_working


def _compiled(model: nn.Module) -> nn.Module:
    """The compiled module that the Trainer calls.

    The Trainer hands its callbacks the module inside, whose hooks compiled code does not run.
    """
    from torch._dynamo import OptimizedModule

    found = (each for each in gc.get_objects() if type(each) is OptimizedModule)
    return next((each for each in found if bare(each) is model), model)


class _Wrapped:
    """A function of a module that tells a listener of its calls, until `undo`.

    Where another one has wrapped it since, that wrapper stays, and this one falls silent.
    """

    def __init__(self, owner: Any, name: str, listener: Callable[..., None]) -> None:
        self._owner, self._name, self._original = owner, name, getattr(owner, name)
        self._listener: Callable[..., None] | None = listener

        @functools.wraps(self._original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._listener is not None:
                self._listener(*args, **kwargs)
            return self._original(*args, **kwargs)

        self._call = call
        setattr(owner, name, call)

    def undo(self) -> None:
        self._listener = None
        if getattr(self._owner, self._name) is self._call:
            setattr(self._owner, self._name, self._original)
