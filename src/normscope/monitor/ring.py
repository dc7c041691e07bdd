"""Ring: copies of a run's last good states, to which it can go back."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normscope.errors import UsageError
from normscope.monitor.reductions import local, squares

SNAPSHOTS = 2
"""Snapshots that are held: with one every k steps the older one is k to 2 k steps old."""
TRIES = 2
"""Times that a run goes back to one snapshot before it goes to the one before."""
MIB = 2**20


class Snapshot:
    """Copy of the trained weights, the buffers and the optimizers' states, in host memory.

    Of a sharded tensor it holds this process's part. Learning rates and other settings are not part of it.

    Args:
        step: the step before whose update it is taken.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], step: int) -> None:
        self.step, self.tries = step, 0
        self._model, self._optimizers = model, optimizers
        self._weights = [(parameter, _copied(parameter)) for parameter in _parameters(optimizers)]
        self._buffers = {name: _copied(buffer) for name, buffer in model.named_buffers()}
        self._states = [{p: _copied(state) for p, state in each.state.items()} for each in optimizers]

    @property
    def num_bytes(self) -> int:
        """Size of all copies."""
        states = [tensor for state in self._states for tensor in _tensors(state)]
        held = [*(weight for _, weight in self._weights), *self._buffers.values(), *states]
        return sum(tensor.nbytes for tensor in held)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the run back, in place."""
        for parameter, weight in self._weights:
            local(parameter).copy_(weight)
        for name, buffer in self._model.named_buffers():
            if name in self._buffers:
                _restored(buffer, self._buffers[name])
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            for parameter in [each for each in optimizer.state if each not in states]:
                del optimizer.state[parameter]
            for parameter, state in states.items():
                if parameter in optimizer.state:  # else someone has cleared it: it begins anew
                    optimizer.state[parameter] = _restored(optimizer.state[parameter], state)


class Ring:
    """The last good states of a run, one every `every` steps.

    Args:
        every: steps between two snapshots.
        memory: most host memory of all snapshots, in MiB.

    Attributes:
        is_full: whether the snapshots do not fit into `memory`, so that there are none.

    Raises:
        UsageError: the weights alone do not fit.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, every: int, memory: float
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._every, self._memory = every, memory
        self._held: list[Snapshot] = []
        self._last: int | None = None
        self._finite: list[str] | None = None
        self.is_full = False
        least = SNAPSHOTS * sum(local(p).nbytes for p in _parameters(optimizers)) / MIB
        if least > memory:
            raise UsageError(
                f"back={every} with memory={memory:g}",
                f"at least {math.ceil(least)} MiB for {SNAPSHOTS} copies of the weights",
                "set memory, or leave back out",
            )

    def is_due(self, step: int) -> bool:
        """Whether a snapshot should be kept at `step`."""
        return not self.is_full and (self._last is None or step - self._last >= self._every)

    def is_sound(self) -> bool:
        """Whether all trained weights, buffers and states are finite and no garbage.

        Buffers that were not finite at the first call, such as masks, do not count.
        """
        buffers = {name: b for name, b in self._model.named_buffers() if b.is_floating_point()}
        if self._finite is None:
            self._finite = [name for name, buffer in buffers.items() if _are_finite([buffer])]
        states = [
            tensor for optimizer in self._optimizers for tensor in _tensors(dict(optimizer.state.items()))
        ]
        known = [buffers[name] for name in self._finite if name in buffers]
        return _are_finite([*_parameters(self._optimizers), *known, *states])

    def keep(self, step: int) -> float:
        """Keep the state before the update of `step` in place of the oldest; MiB of all snapshots."""
        self._last = step
        self._held = self._held[1 - SNAPSHOTS :]
        self._held.append(Snapshot(self._model, self._optimizers, step))
        size = SNAPSHOTS * self._held[-1].num_bytes / MIB
        if size > self._memory:
            self.give_up()
        return size

    def give_up(self) -> None:
        """Free the snapshots and keep no more."""
        self._held, self.is_full = [], True

    def go_back(self, step: int, latest: int) -> Snapshot | None:
        """Set the run back at `step` to the newest snapshot from before `latest`, or at it; else the oldest.

        Returns:
            The snapshot; None if every one was tried `TRIES` times.
        """
        usable = [each for each in self._held if each.tries < TRIES]
        chosen = [each for each in usable if each.step <= latest][-1:] or usable[:1]
        if not chosen:
            return None
        found = chosen[0]
        found.tries += 1
        found.restore()
        self._held = self._held[: self._held.index(found) + 1]
        self._last = step
        return found


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """The trained parameters, each once."""
    seen = set[int]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    floats = [local(tensor) for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.isfinite(squares(floats)).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _copied(value: Any) -> Any:
    """A copy in host memory; the values of a dict one by one."""
    if isinstance(value, Tensor):
        return local(value).to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return copy.deepcopy(value)


def _restored(value: Any, kept: Any) -> Any:
    """`kept`, in the memory of `value` where it has the same form."""
    if isinstance(kept, Tensor):
        if isinstance(value, Tensor) and local(value).shape == kept.shape:
            local(value).copy_(kept)
            return value
        return kept.clone()
    if isinstance(kept, dict) and isinstance(value, dict):
        for name in [each for each in value if each not in kept]:
            del value[name]
        for name, each in kept.items():
            value[name] = _restored(value.get(name), each)
        return value
    return copy.deepcopy(kept)
