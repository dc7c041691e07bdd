"""Grids: the values of one quantity by step and site, put together from the rows of a store."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.alarms import is_measured


@dataclass(frozen=True)
class Grid:
    """Values of one quantity by step and site.

    Attributes:
        steps: [n], ascending.
        sites: names of the sites, in depth order.
        values: [n, sites]; NaN where a step has no value of a site.
        present: [n, sites]; False where a step has no value of a site. A NaN where it is True was measured.
    """

    steps: NDArray[np.int64]
    sites: tuple[str, ...]
    values: NDArray[np.float64]
    present: NDArray[np.bool_]


class Part(NamedTuple):
    """Values [steps, sites] of one quantity in the rows of one layout."""

    steps: NDArray[np.int64]
    sites: list[str]
    values: NDArray[np.float64]


def grid_of(parts: Sequence[Part]) -> Grid:
    """Grid of all parts; without sites if there is none."""
    sites = merged(part.sites for part in parts)
    steps = np.unique(np.concatenate([part.steps for part in parts])) if parts else np.empty(0, np.int64)
    values = np.full((len(steps), len(sites)), np.nan)
    present = np.zeros(values.shape, dtype=np.bool_)
    for part in parts:
        columns = np.array([sites.index(site) for site in part.sites])
        cells = np.searchsorted(steps, part.steps)[:, None], columns
        values[cells], present[cells] = part.values, is_measured(part.values)
    return Grid(steps, tuple(sites), values, present)


def whole_of(ranks: Sequence[Grid]) -> Grid:
    """Grid of the whole model, of ranks that hold parts of it: the root of the sum of their squares.

    It has the steps that all of them have.
    """
    steps = functools.reduce(np.intersect1d, (grid.steps for grid in ranks))
    rows = [np.searchsorted(grid.steps, steps) for grid in ranks]
    values = sum(grid.values[row] ** 2 for grid, row in zip(ranks, rows, strict=True)) ** 0.5
    present = np.all([grid.present[row] for grid, row in zip(ranks, rows, strict=True)], axis=0)
    return Grid(steps, ranks[0].sites, values, present)


def merged(parts: Iterable[Sequence[str]]) -> list[str]:
    """Names of all parts; a new name comes after its predecessor, and parts with no name in common follow."""
    names: list[str] = []
    for part in parts:
        at = next((names.index(name) for name in part if name in names), len(names))
        for name in part:
            if name in names:
                at = names.index(name)
            else:
                names.insert(at, name)
            at += 1
    return names
