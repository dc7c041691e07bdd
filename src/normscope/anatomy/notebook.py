"""HTML of an anatomy for a notebook cell."""

from normscope.anatomy.rows import COLUMNS, folded_rows, headline
from normscope.anatomy.types import Anatomy, Block, Stack
from normscope.notebook import Html, badge, fragment, line, table


def anatomy_html(anatomy: Anatomy) -> str:
    """Each stack with its blocks, equal neighbours in one row, and the parts that could not be read."""
    stacks = [_stack(stack) for stack in anatomy.stacks] or [line("no residual stream was read")]
    return fragment(*stacks, *(line(badge("unread", "warning"), " ", words) for words in anatomy.unread))


def _stack(stack: Stack) -> Html:
    rows = [
        (_span(blocks) if index == 0 else "", *cells)
        for blocks, branches in folded_rows(stack)
        for index, cells in enumerate(branches)
    ]
    skips = f"; long skips: {len(stack.long_skips)}" if stack.long_skips else ""
    return table(rows, ("blocks", *COLUMNS), title=headline(stack) + skips)


def _span(blocks: list[Block]) -> str:
    """The first and the last of a run: "layers.0…layers.11 (12)"."""
    ends = dict.fromkeys((blocks[0].site, blocks[-1].site))
    return "…".join(ends) + (f" ({len(blocks)})" if len(blocks) > 1 else "")
