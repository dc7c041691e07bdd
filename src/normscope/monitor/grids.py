"""Grids of a run that grows: only the rows that were not read before are read."""

from typing import Any

import numpy as np

from normscope.monitor.row import PARTS
from normscope.monitor.store import Grid, RunReader


class Grids:
    """Rows of a run that were read.

    Args:
        whole: read quantities that ranks hold parts of for the whole model, whatever the rank.

    Attributes:
        version: changes when rows that were read may no longer be in the store.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole, self._is_sharded = whole, False
        self.version: Any = None
        self._known: dict[tuple[str, int], Grid] = {}

    def look(self, reader: RunReader) -> None:
        """Forget what was read of another run, or before the run went back to an earlier step."""
        version = [(each.rank, each.began, each.rewinds) for each in reader.ranks()]
        if version != self.version:
            self._known, self.version = {}, version
        self._is_sharded = bool(reader.notes().get("sharded"))

    def grid(self, reader: RunReader, quantity: str, rank: int) -> Grid | None:
        """Values of a quantity by step and site; None if no row has it. Call `look` first."""
        before = self._known.get((quantity, rank))
        if before is None or not len(before.steps):
            if quantity not in reader.columns(rank):
                return None
            grid = self._read(reader, quantity, rank)
        else:
            grid = self._read(reader, quantity, rank, after=int(before.steps[-1]))
            grid = _joined(before, grid) if grid.sites == before.sites else self._read(reader, quantity, rank)
        self._known[quantity, rank] = grid
        return grid if len(grid.steps) else None

    def _read(self, reader: RunReader, quantity: str, rank: int, after: int = -1) -> Grid:
        if self._whole and self._is_sharded and quantity in PARTS:
            return reader.whole(quantity, after=after)
        return reader.grid(quantity, rank, after=after)


def _joined(before: Grid, after: Grid) -> Grid:
    return Grid(
        np.concatenate([before.steps, after.steps]),
        before.sites,
        np.concatenate([before.values, after.values]),
        np.concatenate([before.present, after.present]),
    )
