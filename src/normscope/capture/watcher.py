"""Watcher: chooses the model of a training script and follows its steps."""

import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from normscope.capture.child import abandon
from normscope.capture.counting import Counting
from normscope.capture.folder import Folder, Settings
from normscope.capture.following import Following, following
from normscope.errors import UsageError, describe
from normscope.interrupts import postponed
from normscope.recording.calls import Call, Forward, bare, reaches, recorded_forward
from normscope.recording.events import Events
from normscope.recording.roots import chosen_root, holds, ids, num_held
from normscope.recording.tape import Tape, scales_in_graph
from normscope.subjects import Run
from normscope.subjects.feed import tensors_of

LOOK_SECONDS = 0.1
"""Time between two looks whether normscope still waits for the script."""
OUTSIDE_STEPS = 100
"""Steps of optimizers that hold weights of no module after which the script is given up."""
LONELY_BACKWARDS = 100
"""Backwards of a script that has run a module and made no optimizer, after which it is given up."""
BLIND_STEPS = 3
"""Steps in a row without a recorded forward after which the script is given up, or its check is ended."""
BLIND = "its optimizer steps without a backward from its model"


@dataclass
class Watcher:
    """Listener in one process of a training script.

    It takes as the model the module with the most trainable weights in optimizers, among the outermost ones
    that the script calls with gradients, or the one of class `settings.module`. A step is one step of each
    optimizer that holds some of its weights.

    Attributes:
        folder, settings: see there.
        leave: ends this process at once.
    """

    folder: Folder
    settings: Settings
    leave: Callable[[], None]
    events: Events = field(init=False)
    _seen: dict[int, nn.Module] = field(default_factory=dict)
    _calls: dict[int, Call] = field(default_factory=dict)
    _tapes: list[Tape] = field(default_factory=list)
    _forwards: list[Forward] = field(default_factory=list)
    _outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    _spent: list[tuple[Tensor, ...]] = field(default_factory=list)
    _root: nn.Module | None = None
    _own: frozenset[int] = frozenset()
    _following: Counting | None = None
    _order: list[int] = field(default_factory=list)
    _stepping: list[Optimizer] = field(default_factory=list)
    _skipping: list[Optimizer] = field(default_factory=list)
    _scaler: GradScaler | None = None
    _clip: float | None = None
    _num_blind: int = 0
    _num_repeats: int = 0
    _num_outside: int = 0
    _num_lonely: int = 0
    _look: float = 0.0
    _is_over: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.events = Events(self)

    # Events, see `Listener`.

    def begins(self, module: nn.Module) -> None:
        self._guarded(self._begin_forward)

    def _begin_forward(self) -> None:
        self._spent = []
        self._leave_tapes()
        self._end_step()

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._guarded(lambda: self._record(module, args, kwargs, output))

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        has_graph = any(tensor.requires_grad for tensor in tensors_of(output))
        if self._is_over or not has_graph or not any(p.requires_grad for p in module.parameters()):
            return
        self._seen[id(module)] = module
        if self._root is not None and module is not self._root:
            return
        if id(module) in self._calls:
            self._num_repeats += 1
            self._stop_tape(module)
        call = Call.of(module, args, kwargs, output)
        self._calls[id(module)] = call
        self._tapes.append(call.tape)
        call.tape.start()

    def differentiates(self, loss: Tensor) -> None:
        self._guarded(lambda: self._take_loss(loss))

    def _take_loss(self, loss: Tensor) -> None:
        if self._is_over:
            return
        self._require_optimizer()
        is_taken = False
        for call in list(self._calls.values()):
            forward = recorded_forward(call, loss)
            if forward is not None:
                is_taken = True
                self._forwards.append(forward)
                self._outputs.append(call.tape.outputs)
                self._stop_tape(call.module)
        if is_taken:
            return
        for number, outputs in enumerate(self._outputs):
            if reaches(loss, outputs):
                self._forwards[number] = self._forwards[number].with_another(loss)
        if self._following is not None and any(reaches(loss, outputs) for outputs in self._spent):
            assert self._root is not None
            num = len(self._spent)
            part = Forward(self._root, {}, loss.detach(), None, scales_in_graph(loss))
            self._following.also_steps_on(part.unscaled(self._factors(num)).loss / num)

    def _require_optimizer(self) -> None:
        """Count a backward of a script that has made no optimizer; it may update its weights by hand."""
        self._num_lonely = 0 if self.events.optimizers or not self._seen else self._num_lonely + 1
        if self._num_lonely >= LONELY_BACKWARDS:
            ran = ", ".join(sorted({type(bare(module)).__name__ for module in self._seen.values()}))
            raise UsageError(
                f"`{self.settings.command}`, which has made no torch.optim.Optimizer "
                f"in {self._num_lonely} backwards from {ran}",
                "an optimizer of the model's parameters",
                "if the script updates its weights by hand, use torch.optim.SGD instead; "
                "or give a factory that returns (model, batch, loss_fn)",
            )

    def clears(self, parameters: Iterable[Tensor]) -> None:
        self._guarded(lambda: self._drop_forwards(parameters))

    def _drop_forwards(self, parameters: Iterable[Tensor]) -> None:
        if self._forwards:
            gone = {id(parameter) for parameter in parameters}
            kept = [not _shares(forward.module, gone) for forward in self._forwards]
            self._forwards = list(itertools.compress(self._forwards, kept))
            self._outputs = list(itertools.compress(self._outputs, kept))

    def steps(self, optimizer: Optimizer) -> None:
        self._guarded(lambda: self._begin_step(optimizer))

    def stepped(self, optimizer: Optimizer) -> None:
        if self._ends_step(optimizer):
            self._guarded(self._end_step)

    def skipped(self, optimizer: Optimizer) -> None:
        self._guarded(lambda: self._skip_step(optimizer))

    def scales(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def clips(self, norm: float) -> None:
        self._guarded(lambda: self._take_clip(norm))

    def _take_clip(self, norm: float) -> None:
        self._leave_tapes()  # the backward is over
        self._clip = norm

    def ends(self) -> None:
        """The script has ended before its last step; after Ctrl-C, the report is that of the steps so far."""
        if self.folder.has("stop"):
            return
        self._guarded(self._end_step)
        if self._following is not None and not self._is_over:
            self.folder.note(ended=True)
            self._guarded(self._following.finish)

    def forked(self) -> None:
        """This process was forked from one that was watched; it may train a model of its own."""
        self._lock = threading.RLock()  # another thread of that one may hold it
        self.events.forked()
        self._root, self._own, self._following = None, frozenset(), None
        self._forwards, self._outputs, self._spent = [], [], []
        self._order, self._stepping, self._skipping = [], [], []

    # Steps.

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._leave_tapes()
        if self._root is None:  # not `not`: a module may have a length, and a compiled one fails on it
            self._take_root(self._chosen())
        if self._root is None:
            self._pass_over(optimizer)
            return
        if not holds(optimizer, self._own):
            return
        if optimizer in self._stepping:  # the step before had ended
            self._end_step()
        if not self._stepping and not self._begun():
            return
        self._stepping.append(optimizer)

    def _take_root(self, root: nn.Module | None) -> None:
        if root is not None:
            self._root, self._own = root, ids(root)

    def _pass_over(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer that holds weights of no module that has run with gradients."""
        self._num_outside += 1
        if self._num_outside >= OUTSIDE_STEPS and self.settings.module is None:
            ran = ", ".join(sorted({type(bare(module)).__name__ for module in self._seen.values()})) or "none"
            do = "give a factory that returns (model, batch, loss_fn) instead"
            if not self._seen:
                do = f"if the model runs inside a compiled function, set TORCHDYNAMO_DISABLE=1; else {do}"
            raise UsageError(
                f"`{self.settings.command}`, whose {type(optimizer).__name__} took {self._num_outside} steps "
                f"on weights of no module that runs with gradients (modules that do: {ran})",
                "an optimizer of a model's parameters",
                do,
            )

    def _begun(self) -> bool:
        """Begin a step of the model; False if no forward of it was recorded."""
        assert self._root is not None
        is_own = [forward.module is self._root for forward in self._forwards]
        outputs = list(itertools.compress(self._outputs, is_own))
        forwards = self._forwards_of_step()
        for call in list(self._calls.values()):  # outputs that no backward has used
            self._stop_tape(call.module)
        if not forwards:
            self._num_blind += 1
            if self._following is not None:
                self._following.num_blind += 1
            if self._num_blind >= BLIND_STEPS:
                self._end_blind()
            return False
        self._num_blind = 0
        optimizers = [each for each in self.events.optimizers if holds(each, self._own)]
        if len(optimizers) == 1:
            self._order = [id(optimizers[0])]
        else:
            self._spent = outputs  # the next optimizer may step after a backward of its own
        if self._following is None:
            run = Run(
                model=bare(self._root),
                batches=(),
                optimizer=optimizers,
                scheduler=self._schedulers_of(optimizers),
                clip=self._clip,
                precision=str(self.events.autocast or torch.float32).removeprefix("torch."),
                accumulation=len(forwards),
            )
            self._following = following(run, self.folder, self.settings, self._notes(), self.events.paused)
        self._following.before_step(forwards)
        return True

    def _end_blind(self) -> None:
        """End the check after steps without a recorded forward: with a report, if steps were recorded before.

        A process that does not report goes on: the one that does sees the same.

        Raises:
            UsageError: no step was recorded.
        """
        if self._following is None:
            raise UsageError(
                f"`{self.settings.command}`: {BLIND}",
                "a loop of forward, loss.backward() and optimizer.step()",
                "give a factory that returns (model, batch, loss_fn) instead",
            )
        if isinstance(self._following, Following):
            reason = f"{BLIND} after {self._following.step} of {self._following.last} steps"
            self.folder.note(stopped=reason)
            self._following.ended = reason
            self._finish()

    def _end_step(self) -> None:
        if self._stepping and self._following is not None:
            self._order = self._order or [id(optimizer) for optimizer in self._stepping]
            num_skipped, num = len(self._skipping), len(self._stepping)
            self._stepping, self._skipping = [], []
            if self._following.after_step(skipped=num_skipped / num):
                self._finish()

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` is the last one of the step that has begun."""
        return bool(self._stepping and self._order) and id(optimizer) == self._order[-1]

    def _skip_step(self, optimizer: Optimizer) -> None:
        """Count a step of `optimizer` that was not taken; the other optimizers may take theirs."""
        if self._following is None or not holds(optimizer, self._own):
            return
        self._begin_step(optimizer)
        if optimizer in self._stepping:
            self._skipping.append(optimizer)
        if self._ends_step(optimizer):
            self._end_step()

    def _finish(self) -> None:
        assert self._following is not None
        self._is_over = True
        self._following.finish()
        self.leave()

    def _forwards_of_step(self) -> list[Forward]:
        """The model's forwards since the last step, with their losses before scaling and accumulation."""
        taken = [forward for forward in self._forwards if forward.module is self._root]
        self._forwards, self._outputs = [], []
        factors = self._factors(len(taken))
        return [forward.unscaled(factors).of_its_own_items(len(taken)) for forward in taken]

    def _factors(self, num_forwards: int) -> list[float]:
        """Numbers by which a loop may multiply the loss of each of the forwards of a step."""
        scale = [] if self._scaler is None else [self._scaler.get_scale()]
        return [1 / num_forwards, *scale] if num_forwards else scale

    def _chosen(self) -> nn.Module | None:
        """The module to follow; None as long as none of those that ran is in an optimizer."""
        name = self.settings.module
        chosen = chosen_root(self._seen.values(), self.events.optimizers, name)
        if chosen is not None:
            return chosen
        trained = [module for module in self._seen.values() if self._num_held(module)]
        if trained:
            if self._num_blind >= BLIND_STEPS:
                known = ", ".join(sorted({type(bare(module)).__name__ for module in trained}))
                raise UsageError(f"--module {name}", f"a class of a module that trains: {known}", "name one")
            self._num_blind += 1
        return None

    def _num_held(self, module: nn.Module) -> int:
        return num_held(module, self.events.optimizers)

    def _schedulers_of(self, optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
        """The schedulers of these optimizers, without those inside another one."""
        own = [each for each in self.events.schedulers if any(each.optimizer is o for o in optimizers)]
        inner = {id(part) for each in own for part in getattr(each, "_schedulers", ())}
        return [each for each in own if id(each) not in inner]

    def _notes(self) -> tuple[str, ...]:
        """Sentences on the choices that were made, with the reasons."""
        assert self._root is not None
        others = [m for m in self._seen.values() if m is not self._root and self._num_held(m)]
        notes = []
        if others:
            names = ", ".join(f"{type(bare(m)).__name__} ({_count(self._num_held(m))})" for m in others)
            own = f"{type(bare(self._root)).__name__} ({_count(self._num_held(self._root))} trained weights)"
            why = "as --module asks" if self.settings.module else "the largest"
            notes.append(f"of several modules that train, {own} was taken, {why}; others: {names}")
        if self._num_repeats:
            notes.append("the model runs several times for one loss; only the last run was recorded")
        return tuple(notes)

    def _stop_tape(self, module: nn.Module) -> None:
        self._calls.pop(id(module)).tape.is_recording = False
        self._leave_tapes()

    def _leave_tapes(self) -> None:
        """Leave the modes of tapes that record no more, the last one first."""
        while self._tapes and not self._tapes[-1].is_recording and self._tapes[-1].stop():
            self._tapes.pop()

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run `action`, in one thread at a time; an error of it ends the script, and the report says why."""
        if self._is_over:
            return
        if time.monotonic() > self._look:
            self._look = time.monotonic() + LOOK_SECONDS
            if not self.folder.is_watched():
                abandon(self.folder)
        try:
            with self._lock, self.events.muted():
                action()
        except KeyboardInterrupt as stop:  # `Stopped`, or with what a ladder had by then
            with postponed(lambda: None):  # another one must not lose the report, or reach the script
                self._is_over = True
                if isinstance(self._following, Following) and not self.folder.has("done"):
                    self.folder.note(stopped=self._following.interrupted)
                    self._following.store_so_far(stop)
                self.leave()
        except UsageError as error:
            self._give_up(refusal=(error.given, error.expected, error.do))
        except Exception as error:
            home = Path(__file__).resolve().parents[1]
            places = [
                each for each in traceback.extract_tb(error.__traceback__) if home in Path(each[0]).parents
            ]
            self._give_up(
                bug=describe(error),
                place=f"{Path(places[-1].filename).name}, line {places[-1].lineno}",
                trace=traceback.format_exc(),
            )

    def _give_up(self, **reason: Any) -> None:
        self._is_over = True
        self.folder.note(**reason)
        self.folder.tell("done")
        self.leave()


def _shares(module: nn.Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())


def _count(number: int) -> str:
    """3.5M, 12.4k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
