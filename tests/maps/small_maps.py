"""Maps small enough to train many of them."""

from collections.abc import Sequence
from typing import Any

from normscope.maps import Cell, Grid
from normscope.train import RunConfig, TrialConfig


def small_base(model: str = "nn:decoder,width=8,heads=1", **trial: Any) -> RunConfig:
    """A run of a few steps on a few tokens."""
    return RunConfig(
        model=model, batch_size=2, seq_len=8, validation=0.0, trial=TrialConfig(**{"steps": 8} | trial)
    )


def small_grid(**axes: Any) -> Grid:
    """Two schemes of one block at four rates, unless `axes` says otherwise."""
    axes = {"schemes": ["post", "pre"], "depths": [1], "lrs": [1e-3, 3e-3, 1e-2, 3e-2]} | axes
    return Grid(base=axes.pop("base", small_base()), **axes)


def in_crews(cells: Sequence[Cell], size: int) -> list[Sequence[Cell]]:
    """Cells in crews of `size`, as they come."""
    return [cells[i : i + size] for i in range(0, len(cells), size)]
