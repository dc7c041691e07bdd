"""Truth files as ladders of cells: of the regimes, of the forecast's grid, and of `divergence`.

A cell fails if all of its replicas fail, and is left out ("edge") if they disagree.
"""

import importlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forecast import cells as forecast_cells
from benchmarks.predictors import divergence
from benchmarks.predictors.setting import Setting
from normscope.anatomy import read_anatomy
from normscope.subjects import Subject
from normscope.train import Recipe

REPLICAS = 3
"""Replicas of a cell in a truth file of the regimes; a cell with fewer is not finished and left out."""


@dataclass(frozen=True)
class Cell:
    """One learning rate of a ladder.

    Attributes:
        lr: the learning rate.
        fails: whether the run fails; None where replicas disagree.
        last: mean of the replicas' last losses, or of the distance to the entropy; inf if one is not finite.
    """

    lr: float
    fails: bool | None
    last: float


@dataclass(frozen=True)
class Ladder:
    """One model with the truth of its cells, ascending; `make` builds what predictors get.

    Attributes:
        part: "set-on", "held-out" or, of the grid of `divergence`, "last", which is held out too.
    """

    name: str
    cells: tuple[Cell, ...]
    part: str
    make: Callable[[], Setting]

    @property
    def held_out(self) -> bool:
        """Whether no rule of normscope was set on its runs."""
        return self.part != "set-on"

    @property
    def largest(self) -> float | None:
        """The largest learning rate that trains."""
        return max((cell.lr for cell in self.cells if cell.fails is False), default=None)

    @property
    def best(self) -> float | None:
        """The learning rate that trains to the lowest loss."""
        trained = [(cell.last, cell.lr) for cell in self.cells if cell.fails is False]
        return min(trained)[1] if trained else None

    def is_too_small(self, cell: Cell) -> bool:
        """True for a failure below every learning rate that trains, or where none trains: it may be slow."""
        smallest = min((each.lr for each in self.cells if each.fails is False), default=math.inf)
        return bool(cell.fails) and cell.lr < smallest


def read(path: Path, criterion: str = "start") -> list[Ladder]:
    """The ladders of a truth file that have a finished cell.

    Args:
        criterion: for a file of `divergence`: "start" or "paper", see `divergence.CRITERIA`.
    """
    if path.suffix == ".json":
        return list(_forecast_ladders(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if rows and rows[0]["case"].startswith(divergence.PREFIX):
        return list(_divergence_ladders(rows, criterion))
    return list(_regime_ladders(rows))


def _cell(lr: float, fails: Sequence[bool], last: Sequence[float | None]) -> Cell:
    agreed = fails[0] if len(set(fails)) == 1 else None
    known = [loss for loss in last if loss is not None]
    return Cell(lr, agreed, sum(known) / len(known) if len(known) == len(last) else math.inf)


def _by_cell(rows: Sequence[dict[str, Any]]) -> dict[str, dict[float, list[dict[str, Any]]]]:
    found: dict[str, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["case"]][row["lr"]].append(row)
    return found


def _regime_ladders(rows: Sequence[dict[str, Any]]) -> Iterator[Ladder]:
    cases = {f"{c.regime}: {c.name}": c for c in importlib.import_module("benchmarks.regimes.cases").CASES}
    for name, by_rate in _by_cell(rows).items():
        case = cases[name]
        cells = tuple(
            _cell(lr, [not row["trains"] for row in runs], [row["last"] for row in runs])
            for lr, runs in sorted(by_rate.items())
            if len(runs) >= REPLICAS
        )
        if cells:
            recipe = Recipe(optimizer=case.optimizer, lr=cells[0].lr, seed=case.seed)
            make = _maker(partial(case.subject, case.seed), recipe, cells)
            part = "set-on" if case.part == "seen" else "held-out"
            yield Ladder(name, cells, part, make)


def _divergence_ladders(rows: Sequence[dict[str, Any]], criterion: str) -> Iterator[Ladder]:
    cases = {case.name: case for case in divergence.CASES}
    judge = divergence.CRITERIA[criterion]
    for name, by_rate in _by_cell(rows).items():
        case = cases[name]
        cells = tuple(
            _cell(lr, [judge(row) for row in runs], [row["last"] for row in runs])
            for lr, runs in sorted(by_rate.items())
            if len(runs) >= divergence.REPLICAS
        )
        if cells:
            recipe = Recipe(optimizer="adamw", lr=cells[0].lr, seed=case.seed)
            yield Ladder(name, cells, case.part, _maker(partial(case.subject, case.seed), recipe, cells))


def _forecast_ladders(path: Path) -> Iterator[Ladder]:
    known = forecast_cells.kept(path)
    for ladder in forecast_cells.LADDERS:
        found = [(lr, known.get(forecast_cells.name(ladder, lr))) for lr in forecast_cells.RATES]
        cells = tuple(_cell(lr, [not row["trains"]], [row["gap"]]) for lr, row in found if row is not None)
        if cells:
            recipe = Recipe(optimizer=ladder.optimizer, lr=cells[0].lr, seed=ladder.seed)
            yield Ladder(ladder.model, cells, "held-out", _maker(ladder.subject, recipe, cells))


def _maker(build: Callable[[], Subject], recipe: Recipe, cells: Sequence[Cell]) -> Callable[[], Setting]:
    def make() -> Setting:
        subject = build()
        return Setting(subject, read_anatomy(subject), recipe, tuple(cell.lr for cell in cells))

    return make
