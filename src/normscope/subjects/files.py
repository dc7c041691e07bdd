"""Files as one long row of bytes, memory-mapped, so that a text may be larger than the memory."""

import codecs
import functools
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

_CHUNK = 2**20
_MAPS = 64  # a folder may hold more files than a process may keep open


@dataclass(frozen=True)
class FileState:
    """A file, identified by path, size and time: a changed file is another text."""

    path: str
    size: int
    modified: int


@dataclass(frozen=True)
class Files:
    """Concatenated files as bytes (N,); only the requested ranges are read."""

    files: tuple[FileState, ...]

    def __len__(self) -> int:
        return self._stops[-1]

    @functools.cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(accumulate(file.size for file in self.files))

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.array(self._stops)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes [start, stop) as uint8."""
        parts = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            file, end = self.files[index], self._stops[index]
            begin = end - file.size
            parts.append(_mapped(file)[start - begin : min(stop, end) - begin])
            start, index = min(stop, end), index + 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)])

    def counts(self) -> np.ndarray:
        """Number of occurrences of each byte, (256,)."""
        total = np.zeros(256, dtype=np.int64)
        for file in self.files:
            counts = text_counts(file)
            assert counts is not None, "all files are text"
            total += counts
        return total


@functools.lru_cache(maxsize=_MAPS)
def _mapped(file: FileState) -> np.ndarray:
    mapped = np.memmap(file.path, dtype=np.uint8, mode="r", shape=(file.size,))
    return mapped.view(np.ndarray)  # slicing a plain array is faster


def state_of(path: Path) -> FileState:
    """The current state of the file at `path`; OSError if it cannot be read."""
    found = path.stat()
    return FileState(str(path.resolve()), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2**14)
def text_counts(file: FileState) -> np.ndarray | None:
    """Count each byte, (256,); None if the file is not UTF-8 text. The result is cached.

    The last character may be incomplete, as `head -c` leaves it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    counts = np.zeros(256, dtype=np.int64)
    with open(file.path, "rb") as source:
        while chunk := source.read(_CHUNK):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError:
                return None
            counts += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
            if counts[0]:
                return None
    counts.setflags(write=False)
    return counts


def files_under(folder: Path) -> list[Path]:
    """The files in `folder` and its subfolders, sorted by path, without hidden ones (.name)."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)
