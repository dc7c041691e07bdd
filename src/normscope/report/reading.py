"""An anatomy on a terminal: each stack with its blocks, equal neighbours folded into one row."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from normscope.anatomy import Anatomy, Block, Branch, LongSkip, Stack
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
    final, ends = stack.final_norm, "no final norm"
    if final is not None:
        ends = f"final norm: {final.kind} at {final.path or 'the root module'}"
    partly = "" if stack.complete else " (partly read)"
    title = Text(f"{stack.name}: {len(stack.blocks)} blocks{partly}, {ends}", style="bold")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in ("blocks", "branch", "placement", "norm", "join", "scheme"):
        table.add_column(column, overflow="fold")
    for _, run in groupby(stack.blocks, key=_shape):
        blocks = list(run)
        for index, branch in enumerate(blocks[0].branches):
            sites = compress([block.site for block in blocks]) if index == 0 else ""
            cells = (sites, branch.kind, branch.placement, branch.norm, _join(branch), branch.scheme or "")
            table.add_row(*map(Text, cells))
    return table


def _shape(block: Block) -> tuple[object, ...]:
    """The properties that two blocks must share to be in one row."""
    return tuple((b.kind, b.placement, b.norm, _join(b), b.scheme) for b in block.branches)


def _join(branch: Branch) -> str:
    """The join in a formula: "0.81·x + F(x)"."""
    if branch.join == "add":
        return "x + F"
    alpha, beta = (_scale(s) for s in (branch.stream_scale, branch.branch_scale))
    return f"{branch.join}: {alpha}x + {beta}F"


def _rejoins(skip: LongSkip) -> str:
    """The formula of a long skip: "learnt·x + learnt·xᵢ"."""
    return f"{_scale(skip.stream_scale)}x + {_scale(skip.skip_scale)}xᵢ"


def _scale(scale: float | str | None) -> str:
    return "" if scale is None else f"{scale}·" if isinstance(scale, str) else f"{scale:.4g}·"
