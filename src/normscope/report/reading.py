"""An anatomy on a terminal: each stack with its blocks, equal neighbours folded into one row."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from normscope.anatomy import Anatomy, LongSkip, Stack
from normscope.anatomy.rows import COLUMNS, folded_rows, formula, headline
from normscope.report.console import as_text, show
from normscope.report.sites import compress


def print_anatomy(anatomy: Anatomy, console: Console | None = None) -> None:
    """Print a reading; plain text in a pipe."""
    show(lambda width: _parts(anatomy), console)


def text_anatomy(anatomy: Anatomy, width: int = 110) -> str:
    """The same as plain text of `width` columns, for a file."""
    return as_text(lambda width: _parts(anatomy), width)


def _parts(anatomy: Anatomy) -> Iterator[RenderableType]:
    for stack in anatomy.stacks:
        yield _table(stack)
        for join, skips in groupby(stack.long_skips, key=_rejoins):
            into = [skip.into for skip in skips]
            named = [name for name in into if name]
            places = ([compress(named)] if named else []) + (["the end of the stack"] if "" in into else [])
            yield Text.assemble(("long skip  ", "dim"), f"{join} into {' and '.join(places)}")
    if not anatomy.stacks:
        yield Text("no residual stream was read")
    for line in anatomy.unread:
        yield Text.assemble(("unread  ", "bold yellow"), line)


def _table(stack: Stack) -> Table:
    title = Text(headline(stack), style="bold")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in ("blocks", *COLUMNS):
        table.add_column(column, overflow="fold")
    for blocks, branches in folded_rows(stack):
        for index, cells in enumerate(branches):
            sites = compress([block.site for block in blocks]) if index == 0 else ""
            table.add_row(*map(Text, (sites, *cells)))
    return table


def _rejoins(skip: LongSkip) -> str:
    """The formula of a long skip: "learnt·x + learnt·xᵢ"."""
    return formula(skip.stream_scale, skip.skip_scale, "xᵢ")
