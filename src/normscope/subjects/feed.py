"""What a subject eats: endless, deterministic batches, and words for them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.subjects.subject import Batch


@dataclass(frozen=True)
class Portions:
    """How much is fed, and from what generator state."""

    batch_size: int
    seq_len: int
    seed: int


@dataclass(frozen=True)
class Feed:
    """Batches with their description.

    Attributes:
        batches: a fresh iterator at each call, always over the same batches.
        input: what is fed, in words.
        unigram_entropy: of the targets, in nats, or None.
        notes: what a reader must know.
    """

    batches: Callable[[], Iterator[Batch]]
    input: str
    unigram_entropy: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Batch:
        """The batch that probes measure on."""
        return next(self.batches())


class Replay:
    """Makes one iterator of batches endless and repeatable: keeps what it gave, starts again at its end."""

    def __init__(self, source: Iterable[Batch]) -> None:
        self._source = iter(source)
        self._seen: list[Batch] = []

    def __call__(self) -> Iterator[Batch]:
        """From the first batch on."""
        for index in itertools.count():
            if index == len(self._seen):
                try:
                    self._seen.append(next(self._source))
                except StopIteration:
                    break
            yield self._seen[index]
        if self._seen:
            yield from itertools.cycle(self._seen)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with `function` applied to each tensor in it, in tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(map_tensors(function, value) for value in batch)
    return batch


def placed(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """`batch` on `device`, its floating tensors in `dtype` (None: as they are)."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return map_tensors(move, batch)
