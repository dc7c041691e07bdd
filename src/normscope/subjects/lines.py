"""Lines of a text, by their positions, and their ids.

Shapes: N lines, V ids.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from normscope.subjects.corpus import counts_of
from normscope.subjects.text import BLANK, Text

_RETURN, _NEWLINE = 13, 10
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of a text, read on demand.

    Attributes:
        text: the text that was split.
        start, stop: (N,) int64, positions of each line's first byte and after its last, without line ends.
    """

    text: Text
    start: np.ndarray
    stop: np.ndarray

    @classmethod
    def of(cls, text: Text) -> "Lines":
        """Split at \\n or \\r\\n; the last line may lack its end."""
        ends, returns = [np.empty(0, np.int64)], [np.empty(0, bool)]
        for place in range(0, len(text), _CHUNK):
            data = text.read(place, min(place + _CHUNK, len(text)))
            found = np.flatnonzero(data == _NEWLINE)
            before = data[found - 1] if place == 0 else text.read(place - 1, place + len(data))[found]
            ends.append(found + place)
            returns.append((before == _RETURN) & (found + place > 0))
        end, has_return = np.concatenate(ends), np.concatenate(returns)
        if len(text) and (not len(end) or end[-1] != len(text) - 1):
            end, has_return = np.append(end, len(text)), np.append(has_return, False)
        start = np.concatenate([np.zeros(1, np.int64), end + 1])[: len(end)]
        return cls(text, start, end - has_return)

    def __len__(self) -> int:
        return len(self.start)

    def read(self, line: int) -> np.ndarray:
        """The bytes of one line without its end."""
        return self.text.read(int(self.start[line]), int(self.stop[line]))

    def take(self, kept: np.ndarray) -> "Lines":
        """Lines at the indices `kept`, which are in ascending order."""
        return dataclasses.replace(self, start=self.start[kept], stop=self.stop[kept])

    def is_blank(self) -> np.ndarray:
        """Whether each line is only white space, (N,)."""
        blank = np.empty(len(self), dtype=bool)
        for begin, first, last, data in self.blocks(0, len(self)):
            seen = np.append(0, np.cumsum(~np.isin(data, BLANK)))
            blank[first:last] = seen[self.stop[first:last] - begin] == seen[self.start[first:last] - begin]
        return blank

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """Yield (position of the bytes, first line, line after the last, bytes) over the lines [first, last).

        A block has about 1 MiB, and at least one line.
        """
        while first < last:
            begin = int(self.start[first])
            until = max(first + 1, int(np.searchsorted(self.start[:last], begin + _CHUNK)))
            yield begin, first, until, self.text.read(begin, int(self.stop[until - 1]))
            first = until


@dataclass(frozen=True, eq=False)
class ByteLines:
    """Byte ids; each line ends with the id of a newline, from which a decoder learns to stop."""

    lines: Lines
    table: np.ndarray

    def ids(self, line: int) -> np.ndarray:
        """Ids of one line."""
        return self.table[np.append(self.lines.read(line), np.uint8(_NEWLINE))]

    def lengths(self) -> np.ndarray:
        """Number of ids of each line, (N,)."""
        return self.lines.stop - self.lines.start + 1

    def counts(self, first: int, last: int, limit: int) -> np.ndarray:
        """Number of occurrences of each id in the lines [first, last), each cut to `limit`, (V,)."""
        total = np.zeros(256, dtype=np.int64)
        for begin, here, until, data in self.lines.blocks(first, last):
            start, stop = self.lines.start[here:until] - begin, self.lines.stop[here:until] - begin
            steps = np.zeros(len(data) + 1, dtype=np.int8)
            steps[start] += 1
            steps[np.minimum(stop, start + limit)] -= 1
            inside = np.cumsum(steps[:-1], dtype=np.int8).astype(bool)
            total += np.bincount(data[inside], minlength=256)
        total[_NEWLINE] += int((self.lengths()[first:last] <= limit).sum())
        return counts_of(self.table, total)
