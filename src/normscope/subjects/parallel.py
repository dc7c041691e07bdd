"""Parallel texts: line i of the source belongs to line i of the target.

Shapes: N pairs, B pairs of a batch, S tokens of a source, T of a target.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.nn.output import IGNORED
from normscope.subjects.corpus import Source, byte_table
from normscope.subjects.feed import Portions
from normscope.subjects.lines import ByteLines, Lines
from normscope.subjects.subject import Batch
from normscope.subjects.text import Text, kept

if TYPE_CHECKING:
    from normscope.subjects.tokens import TokenLines

Side: TypeAlias = "ByteLines | TokenLines"


@dataclass(frozen=True, eq=False)
class Pairs:
    """Two texts with the same number of lines.

    Attributes:
        source, target: the lines of pairs without a blank side.
        num_blank: number of pairs left out because a side is blank.
        validation: fraction of the pairs, at the end, that is held out for validation.
    """

    source: Lines
    target: Lines
    num_blank: int = 0
    validation: float = 0.0

    @classmethod
    def of(cls, source: Text, target: Text) -> "Pairs":
        """Pair line i with line i; UsageError if the numbers of lines differ, or no pair has words."""
        sides = Lines.of(source), Lines.of(target)
        if len(sides[0]) != len(sides[1]):
            raise UsageError(
                f"{len(sides[0])} lines in {source.name} and {len(sides[1])} in {target.name}",
                "the same number of lines in both, line i of one for line i of the other",
                "fix the files",
            )
        blank = sides[0].is_blank() | sides[1].is_blank()
        both = np.flatnonzero(~blank)
        if not len(both):
            raise UsageError(
                f"source {source.name} and target {target.name} (no line with words on both sides)",
                "at least one such pair of lines",
                "check that the files belong together",
            )
        return cls(sides[0].take(both), sides[1].take(both), int(blank.sum()), source.validation)

    def first(self, count: int) -> "Pairs":
        """The first `count` pairs."""
        return dataclasses.replace(
            self, source=self.source.take(np.arange(count)), target=self.target.take(np.arange(count))
        )

    def __str__(self) -> str:
        blank = f" ({self.num_blank} left out for a blank line)" if self.num_blank else ""
        names = f"{self.source.text.name} and {self.target.text.name}"
        return f"{len(self.source)} pairs of lines of {names}{blank}{kept(self.validation, 'them')}"


@dataclass(frozen=True, eq=False)
class ParallelCorpus(Source):
    """Pairs as ids, each side cut to `limit` tokens and padded to a fixed length.

    Attributes:
        pairs: the pairs of lines.
        source, target: ids of the two sides.
        how: description of the ids, for the report.
        limit: largest number of tokens of a line.
    """

    pairs: Pairs
    source: Side
    target: Side
    how: str
    limit: int

    @classmethod
    def of(cls, pairs: Pairs, source: Side, target: Side, how: str, limit: int) -> "ParallelCorpus":
        """Corpus of the training part of `pairs`."""
        size, validation = len(pairs.source), pairs.validation
        return cls(pairs, source, target, how, limit, size=size, validation=validation)

    def __str__(self) -> str:
        is_cut = (self.source.lengths() > self.limit) | (self.target.lengths() > self.limit)
        cut = f", {int(is_cut.sum())} of the pairs cut to {self.limit} tokens" if is_cut.any() else ""
        return f"{self.pairs} as {self.how}{cut}"

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Occurrences of each id in the targets as fed, (V,) int64, up to the largest id that occurs."""
        return self.target.counts(self.begin, self.end, self.limit)

    def batches(self, num_pairs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless ids (B, S) and labels (B, T), −100 after a line's end, determined by `seed`."""
        if self.begin == self.end:
            raise UsageError(
                f"{self.pairs} (none left for it)", "at least one pair", "give more lines or a larger share"
            )
        widths = [min(self.limit, int(side.lengths().max())) for side in (self.source, self.target)]
        generator = np.random.default_rng(seed)
        while True:
            lines = generator.integers(self.begin, self.end, size=num_pairs).tolist()
            yield (
                _padded([self.source.ids(line) for line in lines], widths[0]),
                _padded([self.target.ids(line) for line in lines], widths[1]),
            )


def _padded(rows: list[np.ndarray], width: int) -> Tensor:
    ids = np.full((len(rows), width), IGNORED, dtype=np.int64)
    for row, line in zip(ids, rows, strict=True):
        row[: len(line)] = line[:width]
    return torch.from_numpy(ids)


def encode_pairs(pairs: Pairs, vocabulary: int, limit: int, reserved: Collection[int] = ()) -> ParallelCorpus:
    """Byte ids, one table for both sides, see `byte_table`."""
    texts = pairs.source.text, pairs.target.text
    table, how = byte_table(lambda: texts[0].counts() + texts[1].counts(), vocabulary, reserved)
    sides = ByteLines(pairs.source, table), ByteLines(pairs.target, table)
    return ParallelCorpus.of(pairs, *sides, how, limit)


def masked_pairs(
    corpus: ParallelCorpus, portions: Portions, ids_name: str, pad: int, decoder_mask: str | None = None
) -> Iterator[Batch]:
    """Batches {ids_name, "attention_mask", "labels"}; the mask is zero at padding."""
    for ids, labels in corpus.batches(portions.batch_size, portions.seed):
        real = ids != IGNORED
        batch = {ids_name: ids.masked_fill(~real, pad), "attention_mask": real.long(), "labels": labels}
        yield batch if decoder_mask is None else batch | {decoder_mask: (labels != IGNORED).long()}
