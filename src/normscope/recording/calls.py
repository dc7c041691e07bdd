"""Recorded forwards of a training script: which module ran, on what, and what its loss was."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normscope.recording.tape import Recording, Tape, copied, num_undone, replayed_loss, scales_in_graph
from normscope.subjects.feed import map_tensors, num_bytes
from normscope.subjects.subject import LOSS_INPUTS, POSITIONAL, Batch, LossFn

KEPT_BYTES = 256 * 2**20
"""Most bytes of the batches that are kept, besides the first."""

ITEMS = "num_items_in_batch"
"""Argument of Hugging Face's models."""


@dataclass(frozen=True)
class Call:
    """A call of a module whose output is on the tape.

    Attributes:
        args, kwargs: copies of its arguments: a script may refill its buffers before the backward. They are
            made after the forward, because a global hook before it is not given keyword arguments: a model
            that writes its inputs in place is recorded with what it wrote.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tape: Tape

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> "Call":
        """The call that has just returned `output`."""
        return Call(module, map_tensors(copied, args), map_tensors(copied, kwargs), Tape(output))


@dataclass(frozen=True)
class Forward:
    """One forward of a module with the loss that was differentiated.

    Attributes:
        module: the module that the script called; see `bare`.
        batch: copy of its arguments, and under `LOSS_INPUTS` of what the loss needs, if it was recorded.
        loss: the value of the loss, as it was differentiated.
        recording: the loss's code; None if it could not be recorded.
        scales: constants that the loss was multiplied by, the last one first, where it could not.
    """

    module: nn.Module
    batch: Mapping[str, Any]
    loss: Tensor
    recording: Recording | None
    scales: tuple[float, ...] = ()

    def unscaled(self, factors: Sequence[float]) -> "Forward":
        """The same before the loss was multiplied by `factors`, see `Recording.without`."""
        if self.recording is None:
            undone = math.prod(self.scales[: num_undone(self.scales, factors)])
            return dataclasses.replace(self, loss=self.loss / undone, scales=())
        recording = self.recording.without(factors)
        batch = {**self.batch, LOSS_INPUTS: (recording.program, *self.batch[LOSS_INPUTS][1:])}
        return Forward(self.module, batch, recording.value, recording)

    def with_another(self, loss: Tensor) -> "Forward":
        """The same after a second backward, from `loss`: the sum of both losses, without its code."""
        batch = {name: value for name, value in self.batch.items() if name != LOSS_INPUTS}
        own = self.scales if self.recording is None else tuple(factor for _, factor in self.recording.scales)
        pairs = zip(own, scales_in_graph(loss), strict=False)
        scales = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Forward(self.module, batch, self.loss + loss.detach(), None, scales)

    def times(self, factor: float) -> "Forward":
        """The same with a loss that is multiplied by `factor`."""
        if self.recording is None or factor == 1:
            return self
        recording = self.recording.times(factor)
        batch = {**self.batch, LOSS_INPUTS: (recording.program, *self.batch[LOSS_INPUTS][1:])}
        return Forward(self.module, batch, self.loss * factor, recording)

    def of_its_own_items(self, num_batches: int) -> "Forward":
        """The same with a loss of this batch, where the model divides by the items of all batches of a step.

        Hugging Face's models are given `num_items_in_batch`, the number of all targets in a step: the losses
        of its batches are parts of a sum. The batches of a `Run` have losses of which the mean is taken.
        """
        items = self.batch.get(ITEMS)
        if items is None or num_batches == 1:
            return self
        return Forward(
            self.module, {**self.batch, ITEMS: items / num_batches}, self.loss * num_batches, self.recording
        )


def recorded_forward(call: Call, loss: Tensor) -> Forward | None:
    """The forward of `call`; None if `loss` gives its output no gradient."""
    recording = call.tape.recording(loss)
    if (recording is None or call.tape.cuts) and not reaches(loss, call.tape.outputs):
        return None
    batch = named_arguments(bare(call.module), call.args, call.kwargs)
    if recording is not None:
        batch |= {LOSS_INPUTS: (recording.program, *recording.given)}
    scales = scales_in_graph(loss) if recording is None else ()
    return Forward(call.module, batch, loss.detach(), recording, scales)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name as far as they have names, the others under `POSITIONAL`."""
    unnamed = {POSITIONAL: args, **kwargs} if args else dict(kwargs)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a signature that is not that of the call, or none
        return unnamed
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return unnamed
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def reaches(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether a backward from `loss` gives a gradient to one of `outputs`."""
    if any(loss is output for output in outputs):
        return True
    wanted = {output.grad_fn for output in outputs if output.grad_fn is not None}
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            left.extend(each for each, _ in node.next_functions)
    return False


def bare(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of `torch.compile`, DDP and DataParallel."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class Forwards:
    """The recorded forwards of a run as batches, in the order of the run, endless: the kept ones repeat.

    All are kept up to `KEPT_BYTES`, and at least the first.
    """

    def __init__(self) -> None:
        self._kept: list[Batch] = []
        self._room = KEPT_BYTES

    def add(self, forward: Forward) -> None:
        """Keep a forward if there is room for it, and its loss is recorded as that of the first."""
        size = num_bytes(forward.batch)
        is_alike = not self._kept or (LOSS_INPUTS in forward.batch) == (LOSS_INPUTS in self._kept[0])
        if is_alike and (size <= self._room or not self._kept):
            self._kept.append(forward.batch)
            self._room -= size

    def __len__(self) -> int:
        """Number of batches that are kept."""
        return len(self._kept)

    def __call__(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches from index `start` on."""
        index = start
        while self._kept:
            yield self._kept[index % len(self._kept)]
            index += 1

    @property
    def loss_fn(self) -> LossFn | None:
        """The loss of these batches; None if it could not be recorded."""
        return replayed_loss if self._kept and LOSS_INPUTS in self._kept[0] else None
