"""Texts as token ids, and endless deterministic windows of them.

Shapes: N tokens of the text, V ids.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.subjects.text import Text, kept

if TYPE_CHECKING:
    from normscope.subjects.tokens import Tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Source(ABC):
    """Items [begin, end) of a data set: the training items or the validation items.

    Attributes:
        size: number of all items.
        validation: fraction of the items, at the end, that is held out for validation.
        is_held_out: whether these are the validation items.
    """

    size: int
    validation: float
    is_held_out: bool = False

    @property
    def begin(self) -> int:
        """Index of the first item."""
        return self._num_trained if self.is_held_out else 0

    @property
    def end(self) -> int:
        """Index after the last item."""
        return self.size if self.is_held_out else self._num_trained

    @property
    def _num_trained(self) -> int:
        return self.size - int(self.validation * self.size)

    @property
    def held_out(self) -> Self | None:
        """The validation items, or None if none are held out."""
        return dataclasses.replace(self, is_held_out=True) if self.validation else None

    @functools.cached_property
    @abstractmethod
    def counts(self) -> np.ndarray:
        """Occurrences of each target among the items, (V,) int64, up to the largest that occurs."""

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the targets' frequencies in nats: the best loss of a model that ignores its input."""
        shares = self.counts[self.counts > 0] / self.counts.sum()
        return max(0.0, float(-(shares * np.log(shares)).sum()))  # one symbol would give -0.0


@dataclass(frozen=True, eq=False)
class Corpus(Source):
    """A text as ids (N,) int64, made when they are read.

    Attributes:
        text: source of the ids.
        row: symbols of the text: bytes, or the tokens of a tokenizer.
        table: id of each symbol.
        how: description of the ids, for the report.
    """

    text: Text
    row: "Text | Tokens"
    table: np.ndarray
    how: str

    @classmethod
    def of(cls, text: Text, row: "Text | Tokens", table: np.ndarray, how: str) -> "Corpus":
        """Corpus of the training part of `row`."""
        return cls(text, row, table, how, size=len(row), validation=text.validation)

    def __str__(self) -> str:
        return f"{self.text.name} as {self.how}{kept(self.validation, 'it')}"

    def __len__(self) -> int:
        return self.end - self.begin

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids [start, stop), counted from the begin of this part."""
        return self.table[self.row.read(self.begin + start, self.begin + stop)]

    @functools.cached_property
    def counts(self) -> np.ndarray:
        return counts_of(self.table, self.row.counts(self.begin, self.end))

    def windows(self, num_sequences: int, length: int, seed: int) -> Iterator[Tensor]:
        """Endless batches (num_sequences, length) of windows at random positions, determined by `seed`."""
        last = len(self) - length
        if last < 0:
            part = f"{'' if self.is_held_out else 'without '}its validation part, " if self.validation else ""
            share = ", another share for validation" if self.validation else ""
            raise UsageError(
                f"{self.text.name} ({part}{len(self)} tokens)",
                f"at least one sequence of {length} tokens",
                f"give a longer text{share} or a smaller --seq-len",
            )
        generator = np.random.default_rng(seed)
        while True:
            starts = generator.integers(0, last + 1, size=num_sequences)
            yield torch.from_numpy(np.stack([self.read(start, start + length) for start in starts.tolist()]))


def counts_of(table: np.ndarray, symbol_counts: np.ndarray) -> np.ndarray:
    """Counts of ids from counts of symbols; `table` maps symbols to ids."""
    counts = np.zeros(int(table.max()) + 1, dtype=np.int64)
    np.add.at(counts, table[: len(symbol_counts)], symbol_counts)
    return counts


def encode(text: Text, vocabulary: int, reserved: Collection[int] = ()) -> Corpus:
    """Byte ids for a model with `vocabulary` ids, see `byte_table`."""
    table, how = byte_table(text.counts, vocabulary, reserved)
    return Corpus.of(text, text, table, how)


def byte_table(counts: Any, vocabulary: int, reserved: Collection[int]) -> tuple[np.ndarray, str]:
    """The id of each byte (256,) for a model with `vocabulary` ids, and a description.

    With 256 or more, id = byte. With fewer, a byte's id is its rank by frequency, skipping `reserved` ids
    (padding, mask); the rarest bytes share the last id.

    Args:
        counts: function that returns the occurrences of each byte, (256,); called only if needed.
    """
    if vocabulary >= 256:
        return np.arange(256), "byte ids"
    free = np.array([i for i in range(vocabulary) if i not in reserved], dtype=np.int64)
    if len(free) < 2:
        raise UsageError(
            f"a vocabulary of {vocabulary}", "at least two ids for text", "give a larger vocabulary"
        )
    rank = np.empty(256, dtype=np.int64)
    rank[np.argsort(-counts(), kind="stable")] = np.arange(256)
    return free[np.minimum(rank, len(free) - 1)], "byte ids by frequency"
