"""One training step under a `Tracker`: its peak, and what is saved for its backward pass."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.planning.saved import Recorder, Saved
from normscope.planning.tracker import Held, Tracker
from normscope.planning.units import Group, Watch
from normscope.planning.work import Work
from normscope.subjects import Subject
from normscope.subjects.feed import tensors_in
from normscope.train import Recipe, build_optimizers

MakeOptimizers = Callable[[nn.Module], Sequence[Optimizer]]
_FUSED = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Footprint:
    """Memory of one training step, in bytes, and its work.

    Attributes:
        peak: most bytes that are alive at once.
        at_peak: what they hold then.
        moment: "forward", "backward" or "optimizer step".
        stays: what is alive between two steps.
        work: forward and backward pass.
    """

    peak: int
    at_peak: dict[Held, int]
    moment: str
    stays: dict[Held, int]
    work: Work


class Step:
    """A subject's training step, as `normscope.train` takes it: forward, loss, backward, optimizer.

    Between two steps there are no gradients. Loss scaling, clipping and accumulation are left out.

    Args:
        subject: model, batch and loss, real or fake; in a fake one's mode.
        make: makes the optimizers of the model.
        precision: see `Recipe`.

    Attributes:
        device: type of the model's device.
    """

    def __init__(self, subject: Subject, make: MakeOptimizers, precision: str) -> None:
        self.subject, self._precision = subject, precision
        self.device = next(subject.model.parameters()).device.type
        if not subject.model.training:
            subject.model.train()
        self.optimizers = list(make(subject.model))
        for optimizer in self.optimizers:
            _choose_as_real(optimizer)

    def record(self, groups: tuple[Group, ...]) -> Saved:
        """Take a first step, which makes the optimizers' state, and record what its forward saves."""
        tracker = self._tracker()
        recorder = Recorder(tracker)
        with recorder.recording(self.subject.model, groups) as saved:
            loss = self._loss()
        total = 0

        def note(parameter: Tensor) -> None:
            nonlocal total
            saved.arrived.setdefault(id(parameter), total)
            total += parameter.numel() * parameter.element_size()

        with _after_each_gradient(self.subject.model, note):
            loss.backward()
        self._step()
        return saved

    def measure(self, groups: tuple[Group, ...] = ()) -> Footprint:
        """Take one more step and follow its memory."""
        tracker = self._tracker()
        stays = _positive(tracker)
        watch, model = _Phases(tracker), self.subject.model

        def note(parameter: Tensor) -> None:
            if parameter.grad is not None:
                tracker.hold([parameter.grad], Held.GRADIENTS)

        with watch.over(model, groups), _after_each_gradient(model, note), tracker:
            loss = self._loss()
            tracker.phase, tracker.moment = Held.BACKWARD, "backward"
            loss.backward()
            del loss
            work = tracker.work
            tracker.phase, tracker.moment = Held.STEP, "optimizer step"
            self._step()
        at_peak = {held: tracker.at_peak[held] for held in Held if tracker.at_peak[held] > 0}
        return Footprint(tracker.peak, at_peak, tracker.peak_moment, stays, work)

    def _loss(self) -> Tensor:
        with torch.enable_grad(), self._autocast():
            return self.subject.loss()

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, getattr(torch, self._precision))

    def _step(self) -> None:
        is_fake = any(isinstance(p, FakeTensor) for p in self.subject.model.parameters())
        with _Ones() if is_fake else contextlib.nullcontext():
            for optimizer in self.optimizers:
                optimizer.step()
        self.subject.model.zero_grad(set_to_none=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _tracker(self) -> Tracker:
        tracker, model = Tracker(), self.subject.model
        tracker.hold(tensors_in(self.subject.batch), Held.BATCH)
        for optimizer in self.optimizers:
            values = (value for state in optimizer.state.values() for value in state.values())
            tracker.hold((value for value in values if isinstance(value, Tensor)), Held.OPTIMIZER)
        tracker.hold(model.buffers(), Held.BUFFERS)
        tracker.hold(model.parameters(), Held.PARAMETERS)
        return tracker


class _Ones(TorchDispatchMode):
    """Mode in which a fake tensor's `item()` is 1: optimizers such as Adafactor read their count of steps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _Phases(Watch):
    """Watch that says of new storages whether a block made them."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def enter(self, unit: object, inputs: list[Tensor]) -> None:
        """A block's storages are those of its call."""
        if self._tracker.phase is Held.ENDS:
            self._tracker.phase = Held.BLOCKS

    def leave(self, unit: object) -> None:
        """After the outermost unit's end, storages are those of the ends again."""
        if self._tracker.phase is Held.BLOCKS and len(self.running) == 1:
            self._tracker.phase = Held.ENDS


@contextlib.contextmanager
def _after_each_gradient(model: nn.Module, note: Callable[[Tensor], None]) -> Iterator[None]:
    handles = [p.register_post_accumulate_grad_hook(note) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose_as_real(optimizer: Optimizer) -> None:
    """Let fake parameters be stepped by the code that steps real ones, which takes other temporary memory.

    Both PyTorch and `build_optimizers` choose one pass over all weights (fused, foreach) only for plain
    parameters.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not params or not all(isinstance(p, FakeTensor) for p in params):
        return
    on_cpu = all(p.device.type == "cpu" for p in params)
    for group in optimizer.param_groups:
        if group.get("fused", True) is not None or group.get("foreach") is not None:
            continue
        if on_cpu and isinstance(optimizer, Adam) and all(p.dtype in _FUSED for p in params):
            group["fused"] = "full_lr" in group  # made by `build_optimizers`
        elif not on_cpu:
            group["foreach"] = True


def _positive(tracker: Tracker) -> dict[Held, int]:
    return {held: tracker.live[held] for held in Held if tracker.live[held] > 0}


def makes(optimizer: str) -> MakeOptimizers:
    """The maker of an optimizer by name: those of `Recipe`, and "adafactor" (torch.optim.Adafactor)."""
    if optimizer == "adafactor":
        return lambda model: [torch.optim.Adafactor(p for p in model.parameters() if p.requires_grad)]
    recipe = Recipe(optimizer=optimizer)
    return lambda model: build_optimizers(model, recipe)
