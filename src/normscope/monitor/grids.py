"""Grids of a run that grows: only the rows that were not read before are read."""

from typing import Any

import numpy as np

from normscope.monitor.store import Grid, RunReader


class Grids:
    """Rows of a run that were read.

    Attributes:
        version: changes when rows that were read may no longer be in the store.
    """

    def __init__(self) -> None:
        self.version: Any = None
        self._known: dict[tuple[str, int], Grid] = {}

    def look(self, reader: RunReader) -> None:
        """Forget what was read of another run, or before the run went back to an earlier step."""
        version = [(each.rank, each.began, each.rewinds) for each in reader.ranks()]
        if version != self.version:
            self._known, self.version = {}, version

    def grid(self, reader: RunReader, quantity: str, rank: int) -> Grid | None:
        """Values of a quantity by step and site; None if no row has it. Call `look` first."""
        before = self._known.get((quantity, rank))
        if before is None or not len(before.steps):
            if quantity not in reader.columns(rank):
                return None
            grid = reader.grid(quantity, rank)
        else:
            grid = reader.grid(quantity, rank, after=int(before.steps[-1]))
            grid = _joined(before, grid) if grid.sites == before.sites else reader.grid(quantity, rank)
        self._known[quantity, rank] = grid
        return grid if len(grid.steps) else None


def _joined(before: Grid, after: Grid) -> Grid:
    return Grid(
        np.concatenate([before.steps, after.steps]),
        before.sites,
        np.concatenate([before.values, after.values]),
        np.concatenate([before.present, after.present]),
    )
