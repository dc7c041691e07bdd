"""Table rows of an anatomy: equal neighbours are folded into one."""

from collections.abc import Iterator
from itertools import groupby

from normscope.anatomy.types import Block, Branch, Scale, Stack

COLUMNS = ("branch", "placement", "norm", "join", "scheme")
"""The names of a row's cells."""


def folded_rows(stack: Stack) -> Iterator[tuple[list[Block], list[tuple[str, ...]]]]:
    """Runs of equal blocks, each with the cells of `COLUMNS` for every branch of one of them."""
    for cells, run in groupby(stack.blocks, key=lambda block: [_cells(branch) for branch in block.branches]):
        yield list(run), cells


def formula(stream_scale: Scale, branch_scale: Scale, branch: str = "F") -> str:
    """The sum of a join: "0.81·x + F"."""
    return f"{_factor(stream_scale)}x + {_factor(branch_scale)}{branch}"


def headline(stack: Stack) -> str:
    """Line above a stack's table: "layers: 12 blocks, final norm: layernorm at norm"."""
    final, ends = stack.final_norm, "no final norm"
    if final is not None:
        ends = f"final norm: {final.kind} at {final.path or 'the root module'}"
    partly = "" if stack.complete else " (partly read)"
    return f"{stack.name}: {len(stack.blocks)} blocks{partly}, {ends}"


def _cells(branch: Branch) -> tuple[str, ...]:
    join = formula(branch.stream_scale, branch.branch_scale)
    join = "x + F" if branch.join == "add" else f"{branch.join}: {join}"
    return (branch.kind, branch.placement, branch.norm, join, branch.scheme or "")


def _factor(scale: Scale) -> str:
    return "" if scale is None else f"{scale}·" if isinstance(scale, str) else f"{scale:.4g}·"
