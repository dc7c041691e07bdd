"""The per-block table of the terminal: one line a block, the middle of a deep stack folded."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from normscope.anatomy import Block, Stack
from normscope.probes import Measurements
from normscope.report.sites import shorten
from normscope.rules import figure

MOST_ROWS = 16
"""Blocks of a stack that are shown in full; of a deeper one the first and the last few."""
_ENDS = 6
_NOTHING = "–"
_FIGURES = (
    ("rms", "stream/rms"),
    ("diversity", "stream/diversity"),
    ("gradient", "gradient/stream"),
    ("σ_max", "jacobian/sigma-max"),
)


def block_table(stack: Stack, measurements: Measurements, width: int) -> Table:
    """A row for each block: norm placement, update-to-stream ratio of each branch, figures of the stream.

    Args:
        stack: the stack to show.
        measurements: the figures; a missing or unmeasured one shows as a dash.
        width: width of the terminal in columns.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    name_width = max(12, min(48, width - 62))
    table.add_column(Text(shorten(stack.name or "block", name_width)), no_wrap=True)
    table.add_column("norms", no_wrap=True)
    table.add_column("update/stream", justify="right", no_wrap=True)
    for name, _ in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    values = {quantity: measurements.of(quantity) for _, quantity in _FIGURES}
    updates = measurements.of("branch/update-ratio")
    for item in folded(stack.blocks):
        if isinstance(item, int):
            table.add_row(Text(f"⋮ {item} more", style="dim"), *["⋮"] * (len(_FIGURES) + 2), style="dim")
            continue
        figures = [_cell(values[quantity].get(item.site)) for _, quantity in _FIGURES]
        table.add_row(
            Text(shorten(item.site, name_width)), _placements(item), _updates(item, updates), *figures
        )
    return table


def folded(blocks: Sequence[Block]) -> Iterator[Block | int]:
    """The blocks to show, and in the fold how many are not."""
    if len(blocks) <= MOST_ROWS:
        yield from blocks
        return
    yield from blocks[:_ENDS]
    yield len(blocks) - 2 * _ENDS
    yield from blocks[-_ENDS:]


def _placements(block: Block) -> str:
    return "+".join(dict.fromkeys(branch.placement for branch in block.branches)) or _NOTHING


def _updates(block: Block, updates: dict[str, float]) -> str:
    shown = [_cell(updates.get(branch.site), digits=2) for branch in block.branches[:3]]
    return " ".join(shown) or _NOTHING


def _cell(value: float | None, digits: int = 3) -> str:
    return _NOTHING if value is None else figure(value, digits)
