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
    """Two texts of as many lines.

    Attributes:
        source, target: lines where neither side is blank.
        num_blank: pairs left out for a blank side.
        validation: the share at the end that training never sees.
    """

    source: Lines
    target: Lines
    num_blank: int = 0
    validation: float = 0.0

    @classmethod
    def of(cls, source: Text, target: Text) -> "Pairs":
        """Line i with line i; UsageError where the texts have not as many lines, or no pair has words."""
        sides = Lines.of(source), Lines.of(target)
        if len(sides[0]) != len(sides[1]):
            raise UsageError(
                f"{len(sides[0])} lines in {source.name} and {len(sides[1])} in {target.name}",
                "as many lines in both, line i of one with line i of the other",
                "fix the files",
            )
        blank = sides[0].is_blank() | sides[1].is_blank()
        both = np.flatnonzero(~blank)
        if not len(both):
            raise UsageError(
                f"source {source.name} and target {target.name} (no line with words on both sides)",
                "lines that belong together",
                "check that the files do",
            )
        return cls(sides[0].take(both), sides[1].take(both), int(blank.sum()), source.validation)

    def first(self, count: int) -> "Pairs":
        """The first `count` of them."""
        return dataclasses.replace(
            self, source=self.source.take(np.arange(count)), target=self.target.take(np.arange(count))
        )

    def __str__(self) -> str:
        blank = f" ({self.num_blank} left out for a blank line)" if self.num_blank else ""
        names = f"{self.source.text.name} and {self.target.text.name}"
        return f"{len(self.source)} pairs of lines of {names}{blank}{kept(self.validation, 'them')}"


@dataclass(frozen=True, eq=False)
class ParallelCorpus(Source):
    """Pairs as ids, each side cut to `limit` and padded to a length that never changes.

    Attributes:
        pairs: source of the ids.
        source, target: their ids.
        how: description of the ids, for the report.
        limit: the most tokens of a line.
    """

    pairs: Pairs
    source: Side
    target: Side
    how: str
    limit: int

    @classmethod
    def of(cls, pairs: Pairs, source: Side, target: Side, how: str, limit: int) -> "ParallelCorpus":
        """Corpus of those of `pairs` that are trained on."""
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
        """Endless ids (B, S) and labels (B, T), −100 where a line has ended; `seed` fixes all."""
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
    """Batches {ids_name, "attention_mask", "labels"} with masks that are zero where there is padding."""
    for ids, labels in corpus.batches(portions.batch_size, portions.seed):
        real = ids != IGNORED
        batch = {ids_name: ids.masked_fill(~real, pad), "attention_mask": real.long(), "labels": labels}
        yield batch if decoder_mask is None else batch | {decoder_mask: (labels != IGNORED).long()}
