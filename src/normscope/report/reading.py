"""An anatomy on a terminal: each stack with its blocks, equal neighbours folded into one row."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from normscope.anatomy import Anatomy, LongSkip, Stack
from normscope.anatomy.rows import COLUMNS, folded_rows, formula, headline
from normscope.report.console import as_text, room_beside, show
from normscope.report.sites import compress, in_lines


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


def _table(stack: Stack, width: int) -> Table:
    title = Text(headline(stack), style="bold")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    rows = [
        (compress([block.site for block in blocks]) if index == 0 else "", *cells)
        for blocks, branches in folded_rows(stack)
        for index, cells in enumerate(branches)
    ]
    room = max(16, room_beside((("blocks", *COLUMNS), *rows), width, gap=2))
    sites = [in_lines(row[0], room) for row in rows]
    longest = max(len(line) for lines in sites for line in lines.split("\n"))
    table.add_column("blocks", overflow="fold", min_width=min(room, longest))
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for lines, (_, *cells) in zip(sites, rows, strict=True):
        table.add_row(*map(Text, (lines, *cells)))
    return table


def _rejoins(skip: LongSkip) -> str:
    """The formula of a long skip: "learnt·x + learnt·xᵢ"."""
    return formula(skip.stream_scale, skip.skip_scale, "xᵢ")
