"""Texts as token ids, and endless deterministic windows of them.

Shapes: N tokens of the text, V ids.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.subjects.text import Text, kept

if TYPE_CHECKING:
    from normscope.subjects.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Corpus:
    """A stretch of a text as ids (N,) int64, made where they are needed.

    Attributes:
        text: source of the ids.
        row: its symbols: bytes, or the tokens of a tokenizer.
        table: the id of each symbol.
        how: description of the ids, for the report.
        start, stop: which part of the row; the whole but for what is kept for validation.
        part: words for that part, for errors.
    """

    text: Text
    row: "Text | Tokens"
    table: np.ndarray
    how: str
    start: int
    stop: int
    part: str = ""

    @classmethod
    def of(cls, text: Text, row: "Text | Tokens", table: np.ndarray, how: str) -> "Corpus":
        """The part of `row` that is trained on."""
        stop = len(row) - int(text.validation * len(row))
        return cls(text, row, table, how, 0, stop, "without its validation part, " if text.validation else "")

    def __str__(self) -> str:
        return f"{self.text.name} as {self.how}{kept(self.text.validation, 'it')}"

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def held_out(self) -> "Corpus | None":
        """The stretch kept for validation, or None where nothing is."""
        if not self.text.validation:
            return None
        part = "its validation part, "
        return dataclasses.replace(self, start=self.stop, stop=len(self.row), part=part)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids [start, stop) of this stretch."""
        return self.table[self.row.read(self.start + start, self.start + stop)]

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Number of occurrences of each id, (V,) int64, up to the largest id that occurs."""
        return counts_of(self.table, self.row.counts(self.start, self.stop))

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the ids' frequencies in nats: what a model that ignores context can reach."""
        return entropy(self.counts)

    def windows(self, num_sequences: int, length: int, seed: int) -> Iterator[Tensor]:
        """Endless batches (num_sequences, length) of stretches from random places; `seed` fixes all."""
        last = len(self) - length
        if last < 0:
            share = ", another share for validation" if self.text.validation else ""
            raise UsageError(
                f"{self.text.name} ({self.part}{len(self)} tokens)",
                f"at least one sequence of {length} tokens",
                f"give a longer text{share} or a smaller --seq-len",
            )
        generator = np.random.default_rng(seed)
        while True:
            starts = generator.integers(0, last + 1, size=num_sequences)
            yield torch.from_numpy(np.stack([self.read(start, start + length) for start in starts.tolist()]))


def entropy(counts: np.ndarray) -> float:
    """Entropy of the frequencies that `counts` give, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum()))  # of one symbol it would be -0.0


def counts_of(table: np.ndarray, symbol_counts: np.ndarray) -> np.ndarray:
    """Counts of ids, where `table` says which symbols become which."""
    counts = np.zeros(int(table.max()) + 1, dtype=np.int64)
    np.add.at(counts, table[: len(symbol_counts)], symbol_counts)
    return counts


def encode(text: Text, vocabulary: int, reserved: Collection[int] = ()) -> Corpus:
    """Byte ids for a model of `vocabulary` ids, see `byte_table`."""
    table, how = byte_table(text.counts, vocabulary, reserved)
    return Corpus.of(text, text, table, how)


def byte_table(counts: Any, vocabulary: int, reserved: Collection[int] = ()) -> tuple[np.ndarray, str]:
    """The id of each byte (256,) for a model of `vocabulary` ids, and words for it.

    With 256 or more, id = byte. With fewer, a byte's id is its rank by frequency, skipping `reserved` ids
    (padding, mask); the rarest bytes share the last one.

    Args:
        counts: gives how often each byte occurs, (256,); asked where it matters.
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
