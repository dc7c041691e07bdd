"""Columns of a page: many steps in few columns, in which no extreme and no broken value is lost."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.store import Grid
from normscope.report.report import strict

MOST = 600
"""Columns of a page at most."""


@dataclass(frozen=True)
class Held:
    """Part of a grid that a reader holds: its rows, and how many of them make a column."""

    width: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Columns:
    """Columns of a grid, from one on.

    Attributes:
        width: rows of the grid in a column, a power of 2.
        rows: rows of the whole grid.
        start: number of the first column here; a reader that holds more drops them.
        first, last: [columns] first and last step of each.
        low, high: [sites, columns] extremes of the finite values; NaN without one.
        broken: (column, site, value, step) of the first value of each column and site that is not finite.
    """

    width: int
    rows: int
    start: int
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    broken: list[tuple[int, int, float, int]]

    def to_dict(self) -> dict[str, Any]:
        """The columns as JSON can hold them; six digits of each value; no "high" where it is "low"."""
        found = {
            "width": self.width,
            "rows": self.rows,
            "start": self.start,
            "first": self.first.tolist(),
            "last": self.last.tolist(),
            "low": _figures(self.low),
            "broken": [strict(list(each)) for each in self.broken],
        }
        return found if self.width == 1 else found | {"high": _figures(self.high)}


def condense(grid: Grid, held: Held | None = None, most: int = MOST) -> Columns:
    """At most `most` columns of a grid, or those that a reader lacks who holds its first rows.

    A column is the same however much of the grid came later, as long as the width stays.
    """
    count = len(grid.steps)
    width = 1
    while -(-count // width) > most:
        width *= 2
    rows = held.rows if held is not None and held.width == width and held.rows <= count else 0
    start = rows // width
    edges = np.arange(start * width, count, width)
    if not len(edges):
        empty = np.empty((len(grid.sites), 0))
        return Columns(width, count, start, grid.steps[:0], grid.steps[:0], empty, empty, [])
    usable = grid.present & np.isfinite(grid.values)
    low = np.minimum.reduceat(np.where(usable, grid.values, math.inf), edges, axis=0).T
    high = np.maximum.reduceat(np.where(usable, grid.values, -math.inf), edges, axis=0).T
    some = np.add.reduceat(usable, edges, axis=0).T > 0
    ends = np.append(edges[1:], count) - 1
    return Columns(
        width,
        count,
        start,
        grid.steps[edges],
        grid.steps[ends],
        np.where(some, low, math.nan),
        np.where(some, high, math.nan),
        _broken(grid, grid.present & ~np.isfinite(grid.values), width, start),
    )


def _broken(
    grid: Grid, wrong: NDArray[np.bool_], width: int, start: int
) -> list[tuple[int, int, float, int]]:
    found: dict[tuple[int, int], tuple[int, int, float, int]] = {}
    rows, sites = np.nonzero(wrong[start * width :])
    for row, site in zip((rows + start * width).tolist(), sites.tolist(), strict=True):
        place = row // width, site
        if place not in found:
            found[place] = (*place, float(grid.values[row, site]), int(grid.steps[row]))
    return list(found.values())


def _figures(values: NDArray[np.float64]) -> list[list[float | None]]:
    return [
        [None if math.isnan(value) else float(f"{value:.6g}") for value in row] for row in values.tolist()
    ]
