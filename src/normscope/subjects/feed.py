"""Endless, deterministic batches and their descriptions."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from normscope.checks import SEED, count
from normscope.errors import BatchesError, UsageError, describe
from normscope.interrupts import Ended
from normscope.subjects.subject import LOSS_INPUTS, Batch, Batches, LossFn

if TYPE_CHECKING:
    from normscope.subjects.corpus import Source

BLOCK = 1024
"""Number of batches drawn from one generator. Another value changes every batch after the first `BLOCK`."""

KEPT_BYTES = 2**28
"""Size of a user's batches that are kept for a second pass."""

_FEW_BATCHES = 1000  # a forecast's runs are shorter
_GONE: Any = object()
_SIZE = count(1, "a whole number from 1", "change it")


@dataclass(frozen=True)
class Portions:
    """Size of the batches, and their seed; `refused` is a longer length that the model does not take."""

    batch_size: int
    seq_len: int
    seed: int
    refused: int | None = None

    def __post_init__(self) -> None:
        _SIZE.require("batch size", self.batch_size)
        _SIZE.require("sequence length", self.seq_len)
        SEED.require("seed", self.seed)

    def for_validation(self) -> "Portions":
        """The same with a fixed seed, so that runs of all seeds are validated on the same batches."""
        return dataclasses.replace(self, seed=0)

    def of_block(self, block: int) -> "Portions":
        """The same with the seed of one block of batches; the first block has the seed itself."""
        if block == 0:
            return self
        (state,) = np.random.SeedSequence([self.seed, block]).generate_state(1, np.uint64)
        return dataclasses.replace(self, seed=int(state >> np.uint64(1)))

    def shortened(self, length: int) -> "Portions":
        """The same with shorter sequences, because the model does not take these."""
        return dataclasses.replace(self, seq_len=length, refused=self.seq_len)

    @property
    def length(self) -> str:
        """The length in words, for the report."""
        refused = "" if self.refused is None else f" (the model cannot take {self.refused})"
        return f"{self.seq_len} tokens{refused}"

    def __str__(self) -> str:
        return f"{self.batch_size} sequences of {self.length}"


DataT = TypeVar("DataT", bound="Source")
DrawnT = TypeVar("DrawnT")


@dataclass(frozen=True)
class Feed:
    """Batches with their description.

    Attributes:
        batches: returns a fresh iterator over the same batches at each call, from any index.
        input: description of the input.
        unigram_entropy: entropy of the targets, in nats, or None.
        notes: remarks for the reader of the report.
        loss_fn: loss of a model's output on a batch, or None if none is known.
        validation: like `batches`, over held-out data; None if nothing is held out.
        is_given: whether the batches are the user's.
        counts: occurrences of each target in all data, (V,), or None.
    """

    batches: Batches
    input: str
    unigram_entropy: float | None = None
    notes: tuple[str, ...] = ()
    validation: Batches | None = None
    loss_fn: LossFn | None = None
    is_given: bool = False
    counts: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        data: DataT,
        portions: Portions,
        make: Callable[[DataT, Portions], Iterator[Batch]],
        words: str,
        loss_fn: LossFn | None = None,
    ) -> "Feed":
        """A feed of the batches that `make` cuts from `data` and from its validation items."""
        held_out = data.held_out
        validation = None
        if held_out is not None:
            validation = in_blocks(functools.partial(make, held_out), portions.for_validation())
        batches = in_blocks(functools.partial(make, data), portions)
        entropy, counts = data.unigram_entropy, data.counts
        return cls(batches, words, entropy, validation=validation, loss_fn=loss_fn, counts=counts)

    def map(self, function: Callable[[Batch], Batch]) -> "Feed":
        """The same with each batch changed."""
        validation = self.validation
        return dataclasses.replace(
            self,
            batches=mapped(function, self.batches),
            validation=None if validation is None else mapped(function, validation),
        )

    def noting(self, *notes: str) -> "Feed":
        """The same with more notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))


def in_blocks(make: Callable[[Portions], Iterator[Batch]], portions: Portions) -> Batches:
    """The batches of `make(portions)`, in blocks of `BLOCK` batches, each block with its own seed.

    A run that is resumed at batch n therefore draws at most `BLOCK` batches again.
    """

    def batches(start: int = 0) -> Iterator[Batch]:
        first, skipped = divmod(start, BLOCK)
        for block in itertools.count(first):
            yield from itertools.islice(make(portions.of_block(block)), skipped, BLOCK)
            skipped = 0

    return batches


def mapped(function: Callable[[Batch], Batch], batches: Batches) -> Batches:
    """`batches` with `function` applied to each."""

    def changed(start: int = 0) -> Iterator[Batch]:
        return map(function, batches(start))

    return changed


class Replay:
    """Make an iterable of batches endless and repeatable, in bounded memory.

    The first batches are kept, up to `KEPT_BYTES` and at least one. The first pass takes the others from the
    source. A second pass, and a pass beyond the end of the source, repeats the kept batches. A source that
    raised an error has not ended: every pass that comes to that batch raises it again.
    """

    def __init__(self, source: Iterable[Batch]) -> None:
        self._is_held = isinstance(source, Sequence)  # the caller holds all batches anyway
        self._kept: list[Batch] = []
        self._room, self._num_drawn = KEPT_BYTES, 0
        self._failure: Exception | None = None
        self._source = self._tried(lambda: iter(source))

    def __call__(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches from index `start` on; nothing if the source is empty.

        Raises:
            BatchesError: the source raised an error, or gave an empty batch.
        """
        for index in itertools.count(start):
            batch = self._drawn(index)
            if batch is _GONE and not self._kept:
                return
            yield self._kept[index % len(self._kept)] if batch is _GONE else batch

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report if not all batches of the source were kept."""
        first = next(self(), None)
        few = KEPT_BYTES // max(1, num_bytes(first))
        if self._is_held or few >= _FEW_BATCHES:
            return ()
        return (f"only the iterator's first {max(1, few)} batches are kept: a second pass repeats them",)

    def _drawn(self, index: int) -> Any:
        """Batch `index` of the source; `_GONE` if the source is beyond it or has ended."""
        batch: Any = _GONE
        while self._num_drawn <= index:
            batch = self._tried(self._next)
            if batch is _GONE:
                break
            self._num_drawn += 1
            if self._is_held or self._room > 0:
                self._kept.append(batch)
                self._room -= num_bytes(batch)
        return batch

    def _tried(self, draw: Callable[[], DrawnT]) -> DrawnT:
        """`draw()`, with an error of the user's code as a `BatchesError`.

        The error is kept: a generator that raised one gives no more batches, as if it had come to its end.
        """
        if self._failure is None:
            try:
                return draw()
            except Ended:
                raise
            except (MemoryError, torch.OutOfMemoryError) as error:
                self._failure = error
            except UsageError as error:
                self._failure = BatchesError(error.given, error.expected, error.do)
                self._failure.__cause__ = error
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                self._failure = BatchesError(
                    f"batch {self._num_drawn + 1} of the batches raised {describe(error)}",
                    "a batch, or the end of the batches",
                    "fix the code that makes them; add --traceback to see where it failed",
                )
                self._failure.__cause__ = error
        raise self._failure

    def _next(self) -> Any:
        """The next batch of the source; `_GONE` at its end.

        Raises:
            UsageError: what the model reads first in it is empty, so that the loss would be nan.
        """
        batch = next(self._source, _GONE)
        parts = batch.items() if isinstance(batch, Mapping) else [("", batch)]
        read = ((name, tensor) for name, part in parts if name != LOSS_INPUTS for tensor in tensors_of(part))
        name, first = next(read, ("", None))
        if first is not None and first.numel() == 0:
            which = f'"{name}"' if name else "its first tensor"
            shape = tuple(first.shape)
            raise UsageError(
                f"batch {self._num_drawn + 1} of the batches is empty: {which} has shape {shape}",
                "at least one value in each batch",
                "leave empty batches out",
            )
        return batch


def num_bytes(batch: Any) -> int:
    """Size of a batch's tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors in a batch, in order."""
    return list(tensors_of(batch))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result: in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, slice):
        yield from tensors_of((value.start, value.stop, value.step))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([getattr(value, field.name) for field in dataclasses.fields(value)])


def is_of_tokens(batch: Any) -> bool:
    """Whether the first tensor of a batch, which the model reads, holds ids and no measured values."""
    first = next(iter(tensors_in(batch)), None)
    return first is not None and not first.is_floating_point() and not first.is_complex()


def fingerprint(batches: Iterable[Batch]) -> str:
    """A hash of the values in some batches; equal texts, cut in the same way, have equal hashes."""
    digest = hashlib.sha256()
    for tensor in itertools.chain.from_iterable(map(tensors_in, batches)):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
    """`batch` on `device`, with floating tensors in `dtype` (None: unchanged)."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return map_tensors(move, batch)


def noise(shape: tuple[int, ...], seed: int) -> Iterator[Tensor]:
    """Endless standard normal tensors of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(shape, generator=generator)
