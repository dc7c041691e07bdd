"""An anatomy on a terminal: each stack with its blocks, equal neighbours folded into one row."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, RenderableType
from rich.text import Text

from normscope.anatomy import Anatomy, LongSkip, Stack
from normscope.anatomy.rows import COLUMNS, folded_rows, formula, headline
from normscope.report.console import as_text, room_beside, show
from normscope.report.figure_table import FigureTable
from normscope.report.sites import compress, in_lines

_LEAST = 16
"""Least columns of the sites of blocks beside the other columns."""


def print_anatomy(anatomy: Anatomy, console: Console | None = None) -> None:
    """Print a reading; plain text in a pipe."""
    show(lambda width: _parts(anatomy, width), console)


def text_anatomy(anatomy: Anatomy, width: int = 110) -> str:
    """The same as plain text of `width` columns, for a file."""
    return as_text(lambda width: _parts(anatomy, width), width)


def _parts(anatomy: Anatomy, width: int) -> Iterator[RenderableType]:
    for stack in anatomy.stacks:
        yield _table(stack, width)
        for join, skips in groupby(stack.long_skips, key=_rejoins):
            into = [skip.into for skip in skips]
            named = [name for name in into if name]
            places = ([compress(named)] if named else []) + (["the end of the stack"] if "" in into else [])
            yield Text.assemble(("long skip  ", "dim"), f"{join} into {' and '.join(places)}")
    if not anatomy.stacks:
        yield Text("no residual stream was read")
    for line in anatomy.unread:
        yield Text.assemble(("unread  ", "bold yellow"), line)


def _table(stack: Stack, width: int) -> FigureTable:
    names = ("blocks", *COLUMNS)
    rows = [
        (compress([block.site for block in blocks]) if index == 0 else "", *cells)
        for blocks, branches in folded_rows(stack)
        for index, cells in enumerate(branches)
    ]
    room = max(_LEAST, room_beside((names, *rows), width, gap=2))
    table = FigureTable(
        *(Text(name, style="dim") for name in names),
        wraps=(3, 4),
        box=None,
        title=Text(headline(stack), style="bold"),
    )
    for sites, *cells in rows:
        table.add_row(in_lines(sites, room), *cells)
    return table


def _rejoins(skip: LongSkip) -> str:
    """The formula of a long skip: "learnt·x + learnt·xᵢ"."""
    return formula(skip.stream_scale, skip.skip_scale, "xᵢ")
