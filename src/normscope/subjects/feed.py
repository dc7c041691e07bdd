"""What a subject eats: endless, deterministic batches, and words for them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.subjects.subject import Batch


@dataclass(frozen=True)
class Portions:
    """How much is fed, and from what generator state."""

    batch_size: int
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        for name, value in (("batch size", self.batch_size), ("sequence length", self.seq_len)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} {value!r}", "a whole number from 1", f"change the {name}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed!r}", "a whole number from 0, under 2^63", "change the seed")

    def for_validation(self) -> "Portions":
        """The same from a generator of its own: runs of other seeds are judged on the same batches."""
        return dataclasses.replace(self, seed=0)

    def of_length(self, length: int) -> "Portions":
        """The same with sequences of another length."""
        return dataclasses.replace(self, seq_len=length)

    def pairs(self) -> str:
        """In words, of pairs of sequences."""
        return f"{self.batch_size} pairs of up to {self.seq_len} tokens a side"

    def __str__(self) -> str:
        return f"{self.batch_size} sequences of {self.seq_len} tokens"


class Divided(Protocol):
    """What batches are cut from."""

    @property
    def held_out(self) -> "Self | None":
        """What is kept for validation."""

    @property
    def unigram_entropy(self) -> float:
        """Of the targets, in nats."""


DataT = TypeVar("DataT", bound=Divided)


@dataclass(frozen=True)
class Feed:
    """Batches with their description.

    Attributes:
        batches: a fresh iterator at each call, always over the same batches.
        input: what is fed, in words.
        unigram_entropy: of the targets, in nats, or None.
        notes: what a reader must know.
        validation: as `batches`, of what those never hold; None where nothing is kept for it.
    """

    batches: Callable[[], Iterator[Batch]]
    input: str
    unigram_entropy: float | None = None
    notes: tuple[str, ...] = ()
    validation: Callable[[], Iterator[Batch]] | None = None

    @classmethod
    def of(
        cls, data: DataT, portions: Portions, make: Callable[[DataT, Portions], Iterator[Batch]], words: str
    ) -> "Feed":
        """Batches that `make` cuts from `data`, and from what `data` keeps for validation."""
        held_out = data.held_out
        return cls(
            lambda: make(data, portions),
            words,
            data.unigram_entropy,
            validation=None if held_out is None else lambda: make(held_out, portions.for_validation()),
        )

    @property
    def first(self) -> Batch:
        """The batch that probes measure on."""
        return next(self.batches())

    def map(self, function: Callable[[Batch], Batch]) -> "Feed":
        """The same with each batch changed."""
        validation = self.validation
        return dataclasses.replace(
            self,
            batches=lambda: map(function, self.batches()),
            validation=None if validation is None else lambda: map(function, validation()),
        )

    def noting(self, *notes: str) -> "Feed":
        """The same with more notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))


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


def noise(shape: tuple[int, ...], seed: int) -> Iterator[Tensor]:
    """Endless standard normal tensors of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(shape, generator=generator)
