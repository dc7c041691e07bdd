"""Texts: the bytes of a file, of a folder or of the standard library, with a part held out for validation."""

import dataclasses
import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normscope.checks import number
from normscope.errors import UsageError
from normscope.subjects.files import Files, FileState, files_under, state_of, text_counts

STANDARD_LIBRARY = "the Python standard library's source"
_DEFAULT_BYTES = 2**20
_CHUNK = 2**20
BLANK = np.frombuffer(b" \t\n\r\x0b\x0c", dtype=np.uint8)
_EXPECTED, _DO = "a file of UTF-8 text, or a folder of them", "give the path of one"


@dataclass(frozen=True)
class Text:
    """Bytes of a text, with its name.

    Attributes:
        name: name of the text in the report.
        data: the bytes, in memory or in files that are read on demand.
        validation: fraction of the text, at its end, that is held out for validation.
    """

    name: str
    data: bytes | Files
    validation: float = 0.0

    def __post_init__(self) -> None:
        SHARE.require("validation", self.validation)

    def __len__(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes [start, stop) as uint8."""
        if isinstance(self.data, Files):
            return self.data.read(start, stop)
        return np.frombuffer(self.data, dtype=np.uint8)[start:stop]

    def counts(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Number of occurrences of each byte in [start, stop), (256,)."""
        size = len(self)
        stop = size if stop is None else stop
        if isinstance(self.data, Files) and start == 0:  # counted when the files were first read
            whole = self.data.counts()
            return whole if stop == size else whole - self.counts(stop, size)
        total = np.zeros(256, dtype=np.int64)
        for place in range(start, stop, _CHUNK):
            total += np.bincount(self.read(place, min(place + _CHUNK, stop)), minlength=256)
        return total


SHARE = number(
    lambda value: 0 <= value < 1, "a share from 0, under 1", "0.1 keeps the last tenth of the data"
)
"""Requirement on the held-out fraction: it must leave data to train on."""


def kept(validation: float, what: str) -> str:
    """Suffix of a name that states the part held out for validation; "" if nothing is held out."""
    return f", the last {100 * validation:.3g} % of {what} kept for validation" if validation else ""


def load_text(path: Path | None = None, validation: float = 0.0) -> Text:
    """The text of the file or folder `path`, or the standard library's source; UsageError if not text."""
    if path is None:
        return dataclasses.replace(standard_library(), validation=validation)
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name too long, or no permission
        raise UsageError(f'text "{path}" ({error.strerror})', _EXPECTED, _DO) from error
    return _folder(path, validation) if is_folder else _file(path, validation)


@functools.cache
def standard_library() -> Text:
    """The first MiB of the standard library's top-level modules, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= _DEFAULT_BYTES:
            break
    if not data:
        raise UsageError(
            f'the standard library folder "{folder}"',
            "Python source files in it",
            "give a text with --text PATH",
        )
    return Text(STANDARD_LIBRARY, bytes(data[:_DEFAULT_BYTES]))


def _file(path: Path, validation: float) -> Text:
    given = f'text "{path}"'
    if not path.is_file():
        raise UsageError(f"{given} ({'not a file' if path.exists() else 'not found'})", _EXPECTED, _DO)
    try:
        state = state_of(path)
        counts = text_counts(state)
    except OSError as error:
        raise UsageError(f"{given} ({error.strerror})", "a file that can be read", _DO) from error
    if counts is None:
        raise UsageError(f"{given} (binary)", _EXPECTED, _DO)
    if counts.sum() == counts[BLANK].sum():
        raise UsageError(f"{given} (empty)", _EXPECTED, _DO)
    return Text(f'"{path}"', Files((state,)), validation)


def _folder(path: Path, validation: float) -> Text:
    kept: dict[FileState, None] = {}
    left_out = 0
    for each in files_under(path):
        try:
            state = state_of(each)
            is_text = text_counts(state) is not None
        except OSError:  # counted below as left out
            is_text = False
        if is_text and state.size and state not in kept:  # a link does not add a text again
            kept[state] = None
        left_out += not is_text
    without = f", {left_out} without UTF-8 text left out" if left_out else ""
    name = f'"{path}" ({len(kept)} {"file" if len(kept) == 1 else "files"}{without})'
    text = Text(name, Files(tuple(kept)), validation) if kept else None
    if text is None or len(text) == text.counts()[BLANK].sum():
        raise UsageError(f"text {name} (empty)", _EXPECTED, _DO)
    return text
