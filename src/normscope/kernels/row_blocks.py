"""Blocks of rows that stay in a CPU's cache while several operations run over them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

NUMBERS = 1 << 16
"""Numbers of one block; 256 KiB in float32."""


def row_blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of x (rows, n) and of tensors with as many rows.

    There is one block on a GPU, while a graph is recorded, and under `torch.compile`, which fuses operations.
    """
    rows = max(1, NUMBERS // max(1, x.shape[-1]))
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        rows = max(1, len(x))
    return zip(*(each.split(rows) for each in (x, *others)), strict=True)


def by_rows(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """`function` of each block of rows, joined."""
    parts = [function(*block) for block in row_blocks(x, *others)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
