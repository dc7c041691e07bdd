"""Faults that `benchmarks.monitor.fault_runs` draws at random, with the right answers.

A fault is on for one step. Its place is drawn from all modules, parameters and optimizer states of the model.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.monitor.fault_models import Einsum, Task
from normscope.subjects.feed import tensors_in

VALUES = {"NaN": math.nan, "infinity": math.inf, "garbage": 1e30}
WHATS = {
    "data": 2,
    "weight": 4,
    "state": 3,
    "activation": 6,
    "gradient": 4,
    "overflow": 2,
    "variance": 2,
    "backward": 2,
    "mask": 1,
}
"""Kinds of faults, with their weights in the draw."""


class Switch:
    """Whether the fault acts in the forward that begins."""

    on = False


@dataclass
class Fault:
    """A fault that has been put in.

    Attributes:
        what, where, value: its names.
        modules: paths of the module that is the right answer (several where a parameter is tied).
        phase: the right phase.
        begin: called before the forward of the step of the fault.
        end: called after that step.
        batch: the batch of the fault, out of the batch of the step.
    """

    what: str
    where: str
    value: str
    modules: tuple[str, ...]
    phase: str
    begin: Callable[[], Any] = lambda: None
    end: Callable[[], Any] = lambda: None
    batch: Callable[[Any], Any] = field(default=lambda batch: batch)


@dataclass(frozen=True)
class Places:
    """Places in a model at which faults can lie.

    Attributes:
        returned: modules that return a tensor first → the module that made it, "" if the fault cannot tell.
        reached: those whose result gets a gradient.
        learnt: names of the parameters that get a gradient.
    """

    returned: dict[str, str | None]
    reached: frozenset[str]
    learnt: tuple[str, ...]


def first_of(value: Any) -> Tensor | None:
    """The tensor that a fault is written to: what a module returns, or the first of a tuple."""
    if isinstance(value, tuple) and value:
        value = value[0]
    return value if isinstance(value, Tensor) and value.is_floating_point() and value.numel() else None


def replaced(value: Any, tensor: Tensor) -> Any:
    return (tensor, *value[1:]) if isinstance(value, tuple) else tensor


def places_of(task: Task) -> Places:
    """One healthy forward and backward; the gradients are cleared."""
    made: dict[int, str | None] = {}
    kept: list[Any] = []
    returned: dict[str, str | None] = {}
    reached: set[str] = set()

    def hook(path: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: Any, output: Any) -> None:
            tensor = first_of(output)
            if tensor is None:
                return
            kept.append((args, tensor))
            passed = any(tensor is given for given in args)
            returned[path] = made.get(id(tensor)) if passed else made.setdefault(id(tensor), path)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: reached.add(path))

        return seen

    handles = [m.register_forward_hook(hook(path)) for path, m in task.model.named_modules() if path]
    task.loss(task.model, task.batches[0]).backward()
    for handle in handles:
        handle.remove()
    learnt = tuple(name for name, p in task.model.named_parameters() if p.grad is not None)
    task.model.zero_grad(set_to_none=True)
    return Places(returned, frozenset(reached), learnt)


class _Gradient(torch.autograd.Function):
    """The same value, with one entry of its gradient replaced; compiled code has no tensor hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: float, value: float) -> Tensor:
        ctx.given = entry, value
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return written(gradient, *ctx.given), None, None


class WrongBackward(torch.autograd.Function):
    """Identity whose gradient is 0/0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient - gradient)


def written(tensor: Tensor, entry: float, value: float) -> Tensor:
    """A copy with one entry replaced; `entry` in [0, 1) is its place."""
    copy = tensor.clone().reshape(-1)
    copy[int(entry * copy.numel())] = value
    return copy.reshape(tensor.shape)


def draw(
    random: random.Random, task: Task, optimizer: torch.optim.Optimizer, switch: Switch, loop: str
) -> Fault:
    """A fault at random, already installed, which `switch` turns on."""
    places = places_of(task)
    while True:
        what = random.choices(list(WHATS), list(WHATS.values()))[0]
        value = random.choice(list(VALUES))
        entry = random.random()
        fault = _BY_WHAT[what](_Draw(random, task, optimizer, switch, loop, places, value, entry))
        if fault is not None:
            return fault


@dataclass
class _Draw:
    random: random.Random
    task: Task
    optimizer: torch.optim.Optimizer
    switch: Switch
    loop: str
    places: Places
    value: str
    entry: float

    @property
    def number(self) -> float:
        return VALUES[self.value]

    def hook(self, path: str, change: Callable[[Tensor], Tensor | None]) -> None:
        """Change what a module returns while the switch is on."""

        def changed(module: nn.Module, args: Any, output: Any) -> Any:
            tensor = first_of(output) if self.switch.on else None
            new = None if tensor is None else change(tensor)
            return None if new is None else replaced(output, new)

        self.task.model.get_submodule(path).register_forward_hook(changed)

    def set(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.view(-1)[int(self.entry * tensor.numel())] = self.number


def _data(draw: _Draw) -> Fault | None:
    batch = draw.task.batches[0]
    given = batch.get("args", batch)
    if not any(t.is_floating_point() for t in tensors_in(given)):
        return None

    def poisoned(batch: Any) -> Any:
        first = next(t for t in tensors_in(batch.get("args", batch)) if t.is_floating_point())
        draw.set(first)  # the copy of the step
        return batch

    return Fault("data", "batch", draw.value, ("",), "data", batch=poisoned)


def _weight(draw: _Draw) -> Fault | None:
    named = dict(draw.task.model.named_parameters(remove_duplicate=False))
    name = draw.random.choice(list(named))
    owners = tuple(each.rpartition(".")[0] for each, p in named.items() if p is named[name])
    return Fault("weight", name, draw.value, owners, "parameter", begin=lambda: draw.set(named[name]))


def _state(draw: _Draw) -> Fault | None:
    named = dict(draw.task.model.named_parameters(remove_duplicate=False))
    name = draw.random.choice(draw.places.learnt)
    key = draw.random.choice(("exp_avg", "exp_avg_sq"))
    owners = tuple(each.rpartition(".")[0] for each, p in named.items() if p is named[name])

    def begin() -> None:
        draw.set(draw.optimizer.state[named[name]][key])

    return Fault("state", f"{key} of {name}", draw.value, owners, "optimizer state", begin=begin)


def _activation(draw: _Draw) -> Fault | None:
    path = draw.random.choice(list(draw.places.returned))
    draw.hook(path, lambda tensor: written(tensor, draw.entry, draw.number))
    return Fault("activation", path, draw.value, (path,), "forward")


def _gradient(draw: _Draw) -> Fault | None:
    path = draw.random.choice([p for p in draw.places.returned if p in draw.places.reached])
    maker = draw.places.returned[path]
    if draw.loop.startswith("compiled"):
        draw.hook(path, lambda tensor: _Gradient.apply(tensor, draw.entry, draw.number))
        return Fault("gradient", path, draw.value, (path,), "backward")
    if maker is None:
        return None

    def hooked(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: written(gradient, draw.entry, draw.number))

    draw.hook(path, hooked)
    return Fault("gradient", path, draw.value, (maker,), "backward")


def _backward(draw: _Draw) -> Fault | None:
    path = draw.random.choice([p for p in draw.places.returned if p in draw.places.reached])
    draw.hook(path, WrongBackward.apply)
    return Fault("backward", path, "NaN", (path,), "backward")


def _overflow(draw: _Draw) -> Fault | None:
    """A linear map whose first result is above 65504 in float16."""
    if draw.loop != "float16":
        return None
    modules = dict(draw.task.model.named_modules())
    linear = [p for p in draw.places.returned if type(modules[p]).__name__ in ("Linear", "Conv1D")]
    if not linear:
        return None
    path = draw.random.choice(linear)
    module: Any = modules[path]

    def row() -> Tensor:
        return module.weight[:, 0] if type(module).__name__ == "Conv1D" else module.weight[0]

    def begin() -> None:
        with torch.no_grad():
            module.weight.mul_(max(1.0, 2.0 / float(row().abs().sum())))

    def large(module: nn.Module, args: Any) -> Any:
        if not draw.switch.on:
            return None
        given = args[0].clone(memory_format=torch.contiguous_format)
        given.view(-1, given.shape[-1])[0] = 6e4 * row().detach().sign()
        return (given, *args[1:])

    module.register_forward_pre_hook(large)
    return Fault("overflow", path, "float16", (path,), "forward", begin=begin)


def _variance(draw: _Draw) -> Fault | None:
    """A norm with an ε of 0 that gets a row of zeros."""
    modules = dict(draw.task.model.named_modules())
    norms = [p for p in draw.places.returned if _eps(modules[p]) is not None]
    if not norms:
        return None
    path = draw.random.choice(norms)
    module = modules[path]
    name = _eps(module)
    assert name is not None
    old = getattr(module, name)

    def flat(module: nn.Module, args: Any) -> Any:
        if not draw.switch.on:
            return None
        given = args[0].clone(memory_format=torch.contiguous_format)
        given.view(-1, given.shape[-1])[0] = 0.0
        return (given, *args[1:])

    module.register_forward_pre_hook(flat)
    return Fault(
        "variance",
        path,
        "eps 0",
        (path,),
        "forward",
        begin=lambda: setattr(module, name, 0.0),
        end=lambda: setattr(module, name, old),
    )


def _eps(module: nn.Module) -> str | None:
    found = (name for name in ("eps", "variance_epsilon") if isinstance(getattr(module, name, None), float))
    return next(found, None)


def _mask(draw: _Draw) -> Fault | None:
    """A sequence all of whose keys are masked."""
    if not isinstance(draw.task.model, Einsum):
        return None
    seen = torch.ones(2, 8, dtype=torch.bool)
    seen[1] = False

    def masked(batch: Any) -> Any:
        return batch | {"args": (*batch["args"], seen)}

    return Fault("mask", "layers.0.mix", "NaN", ("layers.0.mix",), "forward", batch=masked)


_BY_WHAT: dict[str, Callable[[_Draw], Fault | None]] = {
    "data": _data,
    "weight": _weight,
    "state": _state,
    "activation": _activation,
    "gradient": _gradient,
    "overflow": _overflow,
    "variance": _variance,
    "backward": _backward,
    "mask": _mask,
}


def wrong_names(tensors: Iterator[tuple[str, Tensor]], limit: float = 1e18) -> list[str]:
    """Names of the tensors that hold NaN, infinity or garbage."""
    return [name for name, t in tensors if t.numel() and not bool((t.detach().float().abs() <= limit).all())]
