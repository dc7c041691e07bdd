"""Forwards of one step, each with what it takes to run it again."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from normscope.monitor.wrong_value import Replay, WrongValue, first_wrong_value
from normscope.subjects.feed import tensors_of
from normscope.subjects.rng import keep_random_state

KEPT_BYTES = 256 << 20
"""Largest memory of what is kept of a step's earlier forwards; the oldest are dropped first.

Those of the last forward are kept in any case. Weights are not copied.
"""

RANDOM_STATE_BYTES = 32 << 10
"""Memory of the states of the random generators at the beginning of a forward, about."""

MOST_ROWS, MOST_VALUES = 64, 1 << 20
"""Rows and values of an output that are kept beside its gradient."""

_LATER = {"loss": 1, "backward": 2}
"""Phases that come after every forward with the same backward."""


@dataclass
class _Forward:
    """One forward.

    Attributes:
        replay: what it takes to run it again, without the gradients of its outputs.
        joins: whether it began before the backward of the forward before it.
        num_outputs: number of its floating-point outputs; None until it ends.
        cotangents: gradients of the loss by the outputs, by their numbers; they come in the backward.
        rows: some rows of the outputs, by their numbers.
        num_bytes: memory of its random states, arguments and gradients; 0 until the next forward begins.
        handles: of the hooks on its outputs. An output may be a parameter, whose hooks outlive the step.
    """

    replay: Replay
    joins: bool
    num_outputs: int | None = None
    cotangents: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    rows: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    handles: list[RemovableHandle] = dataclasses.field(default_factory=list)

    @property
    def each_cotangent(self) -> list[Tensor | None]:
        """The gradient by each output, None where there is none."""
        return [self.cotangents.get(number) for number in range(self.num_outputs or 0)]

    def remove_hooks(self) -> None:
        """Remove the hooks on the outputs."""
        for handle in self.handles:
            handle.remove()

    def whole(self, optimizers: Sequence[Optimizer], *, is_updated: bool) -> Replay:
        """The replay with the gradients of its outputs."""
        cotangents = self.each_cotangent if self.cotangents else None
        return dataclasses.replace(
            self.replay, cotangents=cotangents, optimizers=optimizers, is_updated=is_updated
        )


class Forwards:
    """The forwards of one step, to be run again.

    Attributes:
        num_dropped: number of earlier forwards that were dropped.
    """

    def __init__(self) -> None:
        self._kept: list[_Forward] = []
        self._num_bytes = self.num_dropped = 0

    def clear(self) -> None:
        """Free the batches and gradients; a loss that the script keeps would hold them by the hooks."""
        for forward in self._kept:
            forward.remove_hooks()
        self._kept, self._num_bytes, self.num_dropped = [], 0, 0

    def open(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        autocast: torch.dtype | None,
    ) -> None:
        """A forward begins."""
        if self._kept and self._kept[-1].num_outputs is None:  # it raised
            self._kept.pop()
        if self._kept:
            self._weigh(self._kept[-1])
        while self._num_bytes > KEPT_BYTES:
            dropped = self._kept.pop(0)
            dropped.remove_hooks()
            self._num_bytes -= dropped.num_bytes
            self.num_dropped += 1
        joins = bool(self._kept) and not self._kept[-1].cotangents
        self._kept.append(_Forward(Replay(model, args, kwargs, keep_random_state(), autocast), joins))

    def give(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Set the arguments of the forward that has begun, which were not known then."""
        self._kept[-1].replay = dataclasses.replace(self._kept[-1].replay, args=args, kwargs=kwargs)

    def close(self, output: Any, *, with_rows: bool = False) -> None:
        """The forward that has begun ends; its outputs tell their gradients in the backward.

        Args:
            output: what it returns.
            with_rows: whether to copy some rows of it. The whole would be memory that the script frees.
        """
        if not self._kept:
            return
        forward = self._kept[-1]
        outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        forward.num_outputs = len(outputs)
        for number, tensor in enumerate(outputs):
            if tensor.requires_grad:
                take = functools.partial(self._take, forward, number)
                forward.handles.append(tensor.register_hook(take))
            if with_rows and tensor.requires_grad and tensor.ndim > 1 and tensor.numel():
                forward.rows[number] = some_rows(tensor.detach()).clone()

    def _take(self, forward: _Forward, number: int, gradient: Tensor) -> None:
        """Keep a gradient that the backward gives to an output."""
        before = forward.cotangents.get(number)
        forward.cotangents[number] = gradient
        if forward.num_bytes:  # else all are counted at the next forward
            self._add(forward, _num_bytes(gradient) - (0 if before is None else _num_bytes(before)))

    def _weigh(self, forward: _Forward) -> None:
        """Count the memory of a forward that has ended."""
        if not forward.num_bytes:
            held = [*tensors_of((forward.replay.args, forward.replay.kwargs)), *forward.cotangents.values()]
            self._add(forward, RANDOM_STATE_BYTES + sum(map(_num_bytes, held)))

    def _add(self, forward: _Forward, num_bytes: int) -> None:
        forward.num_bytes += num_bytes
        self._num_bytes += num_bytes

    @property
    def cotangents(self) -> list[Tensor | None]:
        """Gradients of the loss by the outputs of the last forward."""
        return self._kept[-1].each_cotangent if self._kept else []

    @property
    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Some rows of the last forward's outputs, if they were kept, and the loss's gradients by them."""
        if not self._kept:
            return []
        forward = self._kept[-1]
        return [
            (rows, some_rows(forward.cotangents[i]))
            for i, rows in forward.rows.items()
            if i in forward.cotangents
        ]

    def last(self, optimizers: Sequence[Optimizer]) -> Replay:
        """The last forward, to be run again."""
        return self._kept[-1].whole(optimizers, is_updated=False)

    def __len__(self) -> int:
        return len(self._kept)

    def first_wrong(self, optimizers: Sequence[Optimizer], *, is_updated: bool = False) -> WrongValue | None:
        """The first wrong value of the step; None if running it again gives none.

        Of forwards with one backward, all that their forwards make comes before the backward.
        """
        for group in self._groups():
            replays = (forward.whole(optimizers, is_updated=is_updated) for forward in group)
            answers = map(first_wrong_value, replays)
            found = [answer for answer in answers if answer is not None]
            if found:
                return min(found, key=lambda answer: _LATER.get(answer.phase, 0))
        return None

    def _groups(self) -> Iterator[list[_Forward]]:
        """Forwards with one backward."""
        ended = [forward for forward in self._kept if forward.num_outputs is not None]
        numbers = itertools.accumulate(not forward.joins for forward in ended)
        for _, pairs in itertools.groupby(zip(numbers, ended, strict=True), key=lambda pair: pair[0]):
            yield [forward for _, forward in pairs]


def some_rows(tensor: Tensor) -> Tensor:
    """Rows (N, D) of the first sequence in a tensor (…, T, D), at even distances."""
    while tensor.ndim > 2:
        tensor = tensor[0]
    most = max(1, min(MOST_ROWS, MOST_VALUES // tensor.shape[1]))
    return tensor[:: -(-len(tensor) // most)]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
