"""The comparison on a terminal: verdict, first parting, differences by part, what was not compared."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from normscope.compare.types import Diff
from normscope.compare.words import lead
from normscope.report.console import as_text, indented, show


def print_diff(diff: Diff, console: Console | None = None) -> None:
    """Print `diff`; colour and width are the terminal's, plain text in a pipe."""
    show(lambda width: _parts(diff, width), console)


def render_text(diff: Diff, width: int = 110) -> str:
    """The same as plain text of `width` columns."""
    return as_text(lambda columns: _parts(diff, columns), width)


def _parts(diff: Diff, width: int) -> Iterator[RenderableType]:
    yield Text(lead(diff))
    for difference in diff.differences:
        yield Text(f"{difference.part}: {difference.name}")
        yield indented(Text(difference.message))
