"""Small maps that train quickly."""

import math
from collections.abc import Sequence
from typing import Any

from normscope.maps import Cell, Grid, Record, Result
from normscope.train import Recipe, RunConfig


def small_base(model: str = "nn:decoder,width=8,heads=1", **trial: Any) -> RunConfig:
    """A run of a few steps on a few tokens."""
    return RunConfig(
        model=model, batch_size=2, seq_len=8, validation=0.0, trial=Recipe(**{"steps": 8} | trial)
    )


def small_grid(**axes: Any) -> Grid:
    """Two schemes of one block at four rates, unless `axes` says otherwise."""
    axes = {"schemes": ["post", "pre"], "depths": [1], "lrs": [1e-3, 3e-3, 1e-2, 3e-2]} | axes
    return Grid(base=axes.pop("base", small_base()), **axes)


def in_crews(cells: Sequence[Cell], size: int) -> list[Sequence[Cell]]:
    """Cells in crews of `size`, in order."""
    return [cells[i : i + size] for i in range(0, len(cells), size)]


UNIGRAM = 3.0
EDGE = {("post", 1): 3e-3, ("post", 2): None, ("pre", 1): 3e-2, ("pre", 2): 1e-2}


def made_up(cell: Cell, state: str = "done") -> Record:
    """A result that trains up to `EDGE`, but for seed 1 one rate less; and one loss that is not finite."""
    if state != "done":
        return Record(cell, state, None, "<b>its reason</b>" if state == "crashed" else None)
    limit = EDGE[cell.scheme, cell.depth] or 0.0
    trains = cell.lr < limit or (cell.lr == limit and (cell.seed == 0 or cell.warmup == 5))
    broken = cell.scheme == "post" and cell.lr == 3e-2
    last = math.nan if broken else UNIGRAM - 0.5 if trains else UNIGRAM + cell.lr
    losses = (5.5, *([last] * (1 if broken else 25)))
    return Record(
        cell,
        "done",
        Result(
            losses=losses, unigram_entropy=UNIGRAM, verdict="trains" if trains else "fails",
            certain_at=2 if broken else None, certain="the loss is not finite" if broken else None,
            stopped=broken, seconds=1.0, stack=2, versions={"torch": "2", "python": "3"},
        ),
    )  # fmt: skip


def result(cell: Cell, **other) -> Result:
    """A result that identifies its cell, with losses that only exact storage keeps."""
    losses = (cell.lr / 3, math.pi * cell.seed, math.inf)
    made = {
        "losses": losses, "unigram_entropy": 1 / 3, "verdict": "fails", "certain_at": 2, "certain": "why",
        "stopped": True, "seconds": 0.1, "stack": 4, "versions": {"torch": "2"},
    }  # fmt: skip
    return Result(**made | other)
