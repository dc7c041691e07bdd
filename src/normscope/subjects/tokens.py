"""Texts as tokens of a model's own `tokenizer.json`: the first part in memory, or the whole in a file.

Shapes: M tokens, N lines.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normscope.atomic import write_file
from normscope.errors import UsageError, describe
from normscope.subjects.corpus import Corpus
from normscope.subjects.lines import Lines
from normscope.subjects.parallel import Pairs, ParallelCorpus
from normscope.subjects.text import Text

FIRST_BYTES, FIRST_PAIRS = 2**18, 2**12
"""Numbers of bytes and pairs that are tokenised to check a model; a training run tokenises the whole text."""

_PIECE, _LINES = 2**20, 2**12
_NEWLINE = 10
_HOW = "tokens of its tokenizer.json"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Ids (M,), in memory or in a file."""

    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids [start, stop)."""
        return self.ids[start:stop]

    def counts(self, start: int, stop: int) -> np.ndarray:
        """Number of occurrences of each id in [start, stop)."""
        total = np.zeros(1, dtype=np.int64)
        for place in range(start, stop, _PIECE):
            total = _counted(total, self.ids[place : min(place + _PIECE, stop)])
        return total


@dataclass(frozen=True, eq=False)
class TokenLines:
    """Lines as ids: the ids (M,) of all lines, and the position (N,) after each line's last."""

    row: np.ndarray
    ends: np.ndarray

    def ids(self, line: int) -> np.ndarray:
        """Ids of one line."""
        return self.row[self.ends[line - 1] if line else 0 : self.ends[line]].astype(np.int64)

    def lengths(self) -> np.ndarray:
        """Number of ids of each line, (N,)."""
        return np.diff(self.ends, prepend=0)

    def counts(self, first: int, last: int, limit: int) -> np.ndarray:
        """Number of occurrences of each id in the lines [first, last), each cut to `limit`, (V,)."""
        total, lengths = np.zeros(1, dtype=np.int64), self.lengths()
        for begin in range(first, last, _LINES):
            until = min(begin + _LINES, last)
            starts = self.ends[begin:until] - lengths[begin:until]
            places = np.arange(starts[0], self.ends[until - 1])
            kept = places - np.repeat(starts, lengths[begin:until]) < limit
            total = _counted(total, self.row[places[kept]])
        return total


def _counted(total: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Add the occurrences of `ids` to `total`, which grows if an id is larger than all before."""
    counts = np.bincount(ids, minlength=len(total)).astype(np.int64)
    counts[: len(total)] += total
    return counts


def tokenised(text: Text, tokenizer: Path, vocabulary: int, folder: Path | None = None) -> Corpus:
    """The text as tokens: the whole, kept in a file of `folder`; without a folder its first 256 KiB."""
    reader, is_part = _Tokenizer(tokenizer, vocabulary), folder is None and len(text) > FIRST_BYTES
    if folder is None:
        ids = reader.ids(text.read(0, min(len(text), FIRST_BYTES)))
    else:
        digest = reader.digest(_blocks(text))
        ids = _kept(folder / f"{digest}.ids", lambda: map(reader.ids, _pieces(text)))
    how = _HOW + (f" (the first {FIRST_BYTES // 1024} KiB)" if is_part else "")
    return Corpus.of(text, Tokens(ids), np.arange(vocabulary), how)


def tokenised_pairs(
    pairs: Pairs, tokenizer: Path, vocabulary: int, limit: int, folder: Path | None = None
) -> ParallelCorpus:
    """The pairs as tokens: all, kept in files of `folder`; without a folder the first 4,096."""
    reader, how = _Tokenizer(tokenizer, vocabulary), _HOW
    if folder is None and len(pairs.source) > FIRST_PAIRS:
        how += f" (the first of {len(pairs.source)} pairs)"
        pairs = pairs.first(FIRST_PAIRS)

    def side(lines: Lines) -> TokenLines:
        if folder is None:
            rows = list(reader.rows(lines))
            return TokenLines(np.concatenate(rows), np.cumsum([len(row) for row in rows]))
        digest = reader.digest([lines.start.tobytes(), lines.stop.tobytes(), *_blocks(lines.text)])
        files = folder / f"{digest}.ids", folder / f"{digest}.lengths"
        if not files[1].exists():  # both are written in one pass
            files[0].unlink(missing_ok=True)
        lengths: list[int] = []

        def counted() -> Iterator[np.ndarray]:
            for row in reader.rows(lines):
                lengths.append(len(row))
                yield row

        row = _kept(files[0], counted)
        return TokenLines(row, np.cumsum(_kept(files[1], lambda: [np.array(lengths)]), dtype=np.int64))

    return ParallelCorpus.of(pairs, side(pairs.source), side(pairs.target), how, limit)


class _Tokenizer:
    """The tokenizer of a file, and the size of the model's vocabulary."""

    def __init__(self, path: Path, vocabulary: int) -> None:
        from tokenizers import Tokenizer  # comes with transformers

        self._path, self._vocabulary = path, vocabulary
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower class
            do = "fix or remove the file"
            raise UsageError(f'"{path}" ({describe(error)})', "a tokenizer", do) from error

    def ids(self, data: np.ndarray) -> np.ndarray:
        """The ids of a text's bytes."""
        text = data.tobytes().decode("utf-8", errors="ignore")
        return self._checked(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def rows(self, lines: Lines) -> Iterator[np.ndarray]:
        """The ids of each line, with the special tokens that end it."""
        for begin in range(0, len(lines), _LINES):
            batch = map(lines.read, range(begin, min(begin + _LINES, len(lines))))
            words = [line.tobytes().decode("utf-8", errors="ignore") for line in batch]
            for encoded in self._tokenizer.encode_batch(words):
                yield self._checked(encoded.ids)

    def digest(self, blocks: Iterable[bytes]) -> str:
        """A hash of the tokenizer and a text, which names the file of its ids."""
        found = hashlib.sha256(self._path.read_bytes())
        for block in blocks:
            found.update(block)
        return found.hexdigest()[:16]

    def _checked(self, ids: list[int]) -> np.ndarray:
        if ids and max(ids) >= self._vocabulary:
            expected = f"ids under the vocabulary of {self._vocabulary}"
            raise UsageError(f'"{self._path}" (id {max(ids)})', expected, "give the model's own")
        return np.array(ids, dtype=np.int64)


def _kept(path: Path, make: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    """The memory-mapped array in a file, which is written first if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)

        def write(half: Path) -> None:
            with half.open("wb") as file:
                for part in make():
                    part.astype(np.uint32).tofile(file)

        write_file(path, write)
    if not path.stat().st_size:
        return np.empty(0, np.uint32)
    return np.memmap(path, dtype=np.uint32, mode="r").view(np.ndarray)


def _blocks(text: Text) -> Iterator[bytes]:
    for place in range(0, len(text), _PIECE):
        yield text.read(place, min(place + _PIECE, len(text))).tobytes()


def _pieces(text: Text) -> Iterator[np.ndarray]:
    """The ids of the text in pieces of about 1 MiB that end at a line's end, or between two characters."""
    start = 0
    while start < len(text):
        data = text.read(start, min(start + _PIECE, len(text)))
        if start + len(data) < len(text):
            ends = np.flatnonzero(data == _NEWLINE)
            begins = np.flatnonzero(data & 0xC0 != 0x80)  # of characters in UTF-8
            data = data[: ends[-1] + 1 if len(ends) else max(1, begins[-1])]
        yield data
        start += len(data)
