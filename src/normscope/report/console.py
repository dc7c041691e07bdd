"""Printing on a terminal, into plain text, and as tables."""

import io
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

NOTHING = "–"
"""A figure that was not measured."""
MARGIN = 8
"""Columns of the margin that holds labels and severities."""
COLOURS = {
    "will fail": "bold red",
    "failed": "bold red",
    "at risk": "bold yellow",
    "no trial": "bold cyan",
    "undecided": "bold cyan",
    "interrupted": "bold cyan",
    "healthy": "bold green",
    "error": "bold red",
    "warning": "bold yellow",
    "note": "bold cyan",
}
"""Style of each verdict and severity."""


def show(parts: Callable[[int], Iterable[RenderableType]], console: Console | None = None) -> None:
    """Print what `parts(width)` yields; colour and width are the terminal's, plain text in a pipe."""
    console = console or Console(file=sys.stdout, highlight=False)
    if console.is_terminal or console.is_jupyter:
        _print(parts, console)
    else:
        console.file.write(as_text(parts, console.width, console.file))


class _Buffer(io.StringIO):
    """A buffer that says of itself what `stream` says: its encoding, and what becomes of other characters."""

    def __init__(self, stream: IO[str] | None) -> None:
        super().__init__()
        self._of = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._of, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self._of, "errors", None)


def as_text(
    parts: Callable[[int], Iterable[RenderableType]], width: int, stream: IO[str] | None = None
) -> str:
    """The same as plain text of `width` columns, no line of which ends in spaces; for `stream`, or a file."""
    buffer = _Buffer(stream)
    _print(parts, Console(file=buffer, width=width, color_system=None, force_terminal=False, highlight=False))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _print(parts: Callable[[int], Iterable[RenderableType]], console: Console) -> None:
    for part in parts(console.width):
        console.print(as_printed(part, console.file) if isinstance(part, Text) else part)


def as_printed(cell: str | Text, stream: IO[str]) -> Text:
    """The cell in the characters that `stream` writes: a "σ" that is spelled "sigma" is five columns wide."""
    text = cell if isinstance(cell, Text) else Text(cell)
    encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None)
    if text.plain.isascii() or not encoding or errors in (None, "strict"):
        return text
    spelled = text.plain.encode(encoding, errors).decode(encoding)
    return text if spelled == text.plain else Text(spelled, style=text.style)


def indented(text: Text, columns: int = MARGIN) -> RenderableType:
    """Text that wraps right of the margin."""
    return _Beside(Text(), text, columns)


def labelled(label: str, words: str, margin: int = MARGIN) -> RenderableType:
    """A dim label in the margin and words that wrap beside it."""
    return _Beside(Text(label, style="dim"), Text(words), margin)


@dataclass(frozen=True)
class _Beside:
    """Words that wrap beside a label, in the characters of the output: "..." is wider than "…"."""

    label: Text
    words: Text
    margin: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=0)
        grid.add_column(width=self.margin)
        grid.add_column(overflow="fold")
        grid.add_row(*(as_printed(text, console.file) for text in (self.label, self.words)))
        yield grid


def is_ascii() -> bool:
    """True if stdout's encoding lacks the characters that pictures are made of."""
    return not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def room_beside(rows: Iterable[Sequence[str]], width: int, gap: int) -> int:
    """Columns of a table's first cell that `width` leaves beside the widest of its other cells."""
    others = [max(map(cell_len, column)) for column in zip(*(row[1:] for row in rows), strict=True)]
    return width - sum(others) - gap * len(others)
