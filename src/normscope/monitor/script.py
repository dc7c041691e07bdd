"""Listener of `normscope watch -- COMMAND` in a process of the script: it drives a monitor by its events.

The processes of a script that train nothing import this, so the monitor is imported at the first forward.
"""

import atexit
import functools
import os
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from normscope.errors import UsageError, describe
from normscope.monitor.launch import Settings, say
from normscope.monitor.rescue import Rescue
from normscope.recording import events
from normscope.recording.events import Events, Silent

if TYPE_CHECKING:
    from normscope.monitor.driven import Driven

SURE = 2
"""Steps of a module after which no other one is taken as the model."""
OUTSIDE_STEPS = 100
"""Steps of optimizers that hold none of the model's weights, after its last one, that end its record."""


def begin() -> None:
    """Watch this process of the script, which has just imported torch."""
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
    script = Script(Settings.given())
    script.events.attach()
    atexit.register(script.ends)
    os.register_at_fork(after_in_child=script.forked)
    sys.excepthook = _without_our_frames(sys.excepthook)
    sys.exit = script.seen_by(sys.exit)


class Script(Silent):
    """Listener that drives the monitor of one process.

    The model is the outermost module with the most trainable weights in optimizers, among those that ran
    before the second step of the best so far (a GAN's critic may step before its generator runs), or the one
    of class `settings.module`. A step ends with the last of its optimizers: the order of several is that of
    the first step.
    """

    def __init__(self, settings: Settings) -> None:
        self.events = Events(self)
        self._settings = settings
        self._clear()

    def _clear(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._root: nn.Module | None = None
        self._monitor: Driven | None = None
        self._own: frozenset[int] = frozenset()
        self._optimizers: list[Optimizer] = []
        self._is_chosen = self._is_only = self._is_over = False
        self._order: list[int] = []
        self._stepping: list[Optimizer] = []
        self._num_outside = self._num_steps = 0
        self._losses: list[Tensor] = []
        self._pending: Tensor | None = None
        self._on_leaves: list[RemovableHandle] = []  # hooks on outputs that outlive their step
        self._scaler: GradScaler | None = None
        self._exit: SystemExit | None = None  # of the last sys.exit, unless a step came after it

    # Events, see `Listener`.

    def begins(self, module: nn.Module) -> None:
        self._guarded(lambda: self._begin_forward(module))

    def _begin_forward(self, module: nn.Module) -> None:
        if module is self._root:
            self._end_step()
        elif not self._is_chosen:
            self._seen.add(module)
            self._choose(module)
        if module is self._root and self._monitor is not None:
            self._monitor.forward_begins()

    def _choose(self, module: nn.Module) -> None:
        """Take `module` as the model if it is the best so far."""
        state = random.getstate()  # a library that is imported may draw from it
        try:
            self._compare(module)
        finally:
            random.setstate(state)

    def _compare(self, module: nn.Module) -> None:
        from normscope.recording.roots import chosen_root, holds, ids

        known = list(self.events.optimizers)
        if known and chosen_root(self._seen, known, self._settings.module) is module:
            if not all(parameter.is_leaf for parameter in module.parameters()):
                self._leave(
                    "not watched: FSDP1 with use_orig_params=True; use normscope.Monitor in the script"
                )
                return
            from normscope.monitor.driven import Driven
            from normscope.monitor.look import Look

            look_every, rescue = self._settings.look_every, self._settings.rescue
            is_another = self._monitor is not None
            if self._monitor is not None:
                self._monitor.discard()
            self._root, self._own = module, ids(module)
            self._optimizers = [each for each in known if holds(each, self._own)]
            self._order = [id(self._optimizers[0])] if len(self._optimizers) == 1 else []
            self._stepping, self._losses, self._num_steps = [], [], 0
            self._monitor = Driven(
                module,
                self._optimizers,
                store=self._settings.store,
                every=self._settings.every,
                resume=self._settings.resume or is_another,
                start=None if self._settings.resume else 0,
                look=None if look_every is None else Look(every=look_every, at_alarm=True),
                rescue=None if rescue is None else Rescue.named(rescue),
            )

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is self._root:
            self._guarded(lambda: self._end_forward(args, kwargs, output))

    def _end_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        from normscope.subjects.feed import tensors_of

        if self._monitor is not None:
            self._monitor.forward_ends(args, kwargs, output)
            for tensor in tensors_of(output):
                if tensor.requires_grad and self._reached not in (tensor._backward_hooks or {}).values():
                    handle = tensor.register_hook(self._reached)
                    if tensor.is_leaf:
                        self._on_leaves.append(handle)

    def differentiates(self, loss: Tensor) -> None:
        if self._monitor is not None:
            self._guarded(lambda: self._take_loss(loss))

    def _take_loss(self, loss: Tensor) -> None:
        from normscope.monitor.taken import scale_of

        value = loss.detach().clone()  # a script may change it in place for its log
        if (scale := scale_of(self._scaler)) is not None:
            value = value / scale
        self._pending = value if value.numel() == 1 else None

    def _reached(self, gradient: Tensor) -> None:
        """A backward has reached the model's output: its loss is the model's."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._losses.append(pending)

    def clears(self, parameters: Iterable[Tensor]) -> None:
        if self._losses and not self._stepping and any(id(each) in self._own for each in parameters):
            self._losses = []  # their gradients are used by no step

    def clips(self, norm: float) -> None:
        if self._is_only and self._monitor is not None:
            self._guarded(self._monitor.see_gradients)

    def scales(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        if self._monitor is not None:
            self._monitor.scaler = scaler

    def steps(self, optimizer: Optimizer) -> None:
        self._guarded(lambda: self._begin_step(optimizer, is_skipped=False))

    def skipped(self, optimizer: Optimizer) -> None:
        self._guarded(lambda: self._begin_step(optimizer, is_skipped=True))
        self.stepped(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        if self._stepping and self._order and id(optimizer) == self._order[-1]:
            self._guarded(self._end_step)

    def _begin_step(self, optimizer: Optimizer, *, is_skipped: bool) -> None:
        from normscope.recording.roots import holds

        if self._monitor is None or not holds(optimizer, self._own):
            self._num_outside += 1
            if self._is_chosen and self._num_outside >= OUTSIDE_STEPS:
                self._leave("the model is trained no more; what the script trains now is not watched")
            return
        self._num_outside = 0
        if any(each is optimizer for each in self._stepping):  # the step before had ended
            self._end_step()
        if torch._C._current_graph_task_id() != -1:
            self._leave("not watched: the optimizers step inside the backward")
            return
        self._stepping.append(optimizer)
        if not is_skipped:
            self._monitor.before_update(optimizer)

    def _end_step(self) -> None:
        """End the step whose optimizers have stepped, if any has."""
        from normscope.recording.roots import num_held

        if not self._stepping or self._monitor is None:
            return
        self._order = self._order or [id(each) for each in self._stepping]
        losses, self._losses, self._pending, self._scaler = self._losses, [], None, None
        self._stepping = []
        self._remove_hooks()
        self._num_steps += 1
        self._exit = None
        if self._num_steps == SURE:
            self._is_chosen = True
            self._is_only = sum(1 for each in self._seen if num_held(each, self.events.optimizers)) == 1
            self._seen.clear()
        loss = torch.stack([each.reshape(()).float() for each in losses]).sum() if losses else None
        self._monitor.step(loss)

    def _remove_hooks(self) -> None:
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves = []

    def ends(self) -> None:
        """The process is about to end."""
        if os.getpid() != self._process:  # a fork that runs what its parent has registered
            return
        ended_by = self._exit
        self._guarded(self._end_step)
        if self._monitor is not None:
            self._leave("", getattr(sys, "last_value", None) or ended_by)
        elif self._num_outside and not self._is_over:
            say(f"not watched: {self._why()}")

    def _why(self) -> str:
        ran = ", ".join(sorted({type(module).__name__ for module in self._seen}))
        if self._settings.module is not None and ran:
            return f"no module of class {self._settings.module} trains; modules that ran: {ran}"
        return f"{self._num_outside} optimizer steps on weights of no module that runs with gradients" + (
            f" (modules that do: {ran})"
            if ran
            else "; set TORCHDYNAMO_DISABLE=1 if a compiled function runs it"
        )

    def seen_by(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """`sys.exit`, which keeps no record of its argument, with one: atexit does not see the exception."""

        @functools.wraps(leave)
        def noted(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():  # of another, it ends that one only
                self._exit = SystemExit(status)
            leave(status)

        return noted

    def forked(self) -> None:
        """This process was forked from one that is watched; it may train a model of its own."""
        _OF_PARENT.append(self._monitor)  # closing its store would be the parent's business
        self.events.forked()
        self._clear()

    def _leave(self, reason: str, error: BaseException | None = None) -> None:
        """End the record."""
        monitor, self._monitor, self._root, self._is_over = self._monitor, None, None, True
        self._optimizers, self._stepping = [], []
        self._remove_hooks()
        if reason and os.environ.get("RANK", "0") == "0":
            say(reason)
        if monitor is not None:
            monitor.close(error)

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run `action`, in one thread at a time; an error of it ends the record, and never the script."""
        if self._is_over:
            return
        with self._lock, self.events.muted():
            try:
                action()
            except UsageError as error:
                self._is_over = True
                say(f"not watched: {error}")
            except Exception as error:
                if self._monitor is None:
                    say(f"not watched: {describe(error)}")
                else:
                    self._monitor.stop(error)
            if self._monitor is not None and self._monitor.is_over:
                self._leave("")


_OF_PARENT: list[Any] = []
_OURS = {str(Path(__file__)), str(Path(events.__file__))}


def _without_our_frames(show: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that shows the traceback as it is without this listener."""

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        each: BaseException | None = error
        known = set[int]()
        while each is not None and id(each) not in known:
            known.add(id(each))
            each.__traceback__ = _filtered(each.__traceback__)
            each = each.__cause__ or each.__context__
        show(kind, error, error.__traceback__)

    return hook


def _filtered(trace: types.TracebackType | None) -> types.TracebackType | None:
    steps, each = [], trace
    while each is not None:
        if each.tb_frame.f_code.co_filename not in _OURS:
            steps.append(each)
        each = each.tb_next
    found: types.TracebackType | None = None
    for each in reversed(steps):
        found = types.TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
