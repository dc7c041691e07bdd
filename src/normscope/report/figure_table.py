"""Tables of figures that cut no figure: where the columns do not fit, each row becomes a short list."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normscope.report.console import as_printed

_NOTHING_TO_LIST = ("", "⋮", ":")
"""Cells that a list leaves out; the last is the second where an encoding lacks it."""
_LEAST_OF_WORDS = 16
"""Least columns of words that wrap."""
_INDENT = 2
Cells = tuple[Text, ...]


class FigureTable:
    """A table where its columns fit into the width, else a list under the first cell of each row.

    rich's own table shortens the cells that do not fit: "0.00548" to "0.0…", which reads as another figure.

    Args:
        columns: the head.
        figures: names of the columns that are flush right.
        wraps: places of the columns that hold words, which may take several lines.
        box: rich's lines between the cells.
        title: a line above.
    """

    def __init__(
        self,
        *columns: str | Text,
        figures: Collection[str] = (),
        wraps: Collection[int] = (),
        box: Box | None = SIMPLE_HEAD,
        title: str | Text = "",
    ) -> None:
        self.columns, self.figures, self.wraps = columns, figures, wraps
        self.box, self.title = box, title
        self.rows: list[tuple[Sequence[str | Text], str, bool]] = []

    def add_row(self, *cells: str | Text, style: str = "", end_section: bool = False) -> None:
        """Add a row; a cell for each column."""
        assert len(cells) == len(self.columns), "a cell for each column"
        self.rows.append((cells, style, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table or the list."""
        head = tuple(as_printed(name, console.file) for name in self.columns)
        rows = [tuple(as_printed(cell, console.file) for cell in cells) for cells, _, _ in self.rows]
        if self.title:
            yield as_printed(self.title, console.file)
        if self._needed([head, *rows]) <= options.max_width:
            yield self._table(head, rows)
        else:
            yield from self._list(head, rows, options.max_width - _INDENT)

    def _needed(self, rows: Sequence[Cells]) -> int:
        """Columns that hold every figure on one line."""
        widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
        for place in self.wraps:
            widths[place] = min(widths[place], _LEAST_OF_WORDS)
        return sum(widths) + (len(widths) - 1) * (2 if self.box is None else 3)

    def _table(self, head: Cells, rows: Sequence[Cells]) -> Table:
        table = Table(box=self.box, show_edge=False, pad_edge=False, padding=(0, 1))
        for place, name in enumerate(head):
            is_figure, is_words = self.columns[place] in self.figures, place in self.wraps
            table.add_column(
                name, justify="right" if is_figure else "left", no_wrap=not is_words, overflow="fold"
            )
        for cells, (_, style, end_section) in zip(rows, self.rows, strict=True):
            table.add_row(*cells, style=style, end_section=end_section)
        return table

    def _list(self, head: Cells, rows: Sequence[Cells], width: int) -> Iterator[RenderableType]:
        if head[0]:
            yield Text(head[0].plain, style="bold")
        for cells, (_, style, _) in zip(rows, self.rows, strict=True):
            if cells[0]:
                yield Text.assemble(cells[0], style=style)
            items = [
                Text.assemble((f"{name.plain} " if name else "", "dim"), cell)
                for name, cell in zip(head[1:], cells[1:], strict=True)
                if cell.plain not in _NOTHING_TO_LIST
            ]
            for line in _filled(items, width):
                yield Padding(line, (0, 0, 0, _INDENT), expand=False)


def _filled(items: Iterable[Text], width: int) -> Iterator[Text]:
    """The items in lines of at most `width` columns; only an item that is longer by itself is wrapped."""
    line = Text()
    for item in items:
        if line and cell_len(line.plain) + len(" · ") + cell_len(item.plain) > width:
            yield line
            line = Text()
        line = Text.assemble(line, " · ", item) if line else item
    if line:
        yield line


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")))
