"""Contents of a store: crews, counts and records, and the conversions between results, rows and records."""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.maps.cell import Cell, Result
from normscope.train import RunConfig

OF_RESULT = tuple(field.name for field in dataclasses.fields(Result))
COLUMNS = ", ".join(("config", "state", "reason", *OF_RESULT))
"""Columns of the cells with their results, in the order in which `record_of` reads them."""


@dataclass(frozen=True)
class Crew:
    """Cells that are trained together."""

    number: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Counts:
    """Progress of a map.

    Attributes:
        waiting, claimed, done, crashed: cells by state.
        trains, fails: cells that are done, by verdict.
        share: fraction of the work that is done; cells are weighted by their number of blocks.
    """

    waiting: int = 0
    claimed: int = 0
    done: int = 0
    crashed: int = 0
    trains: int = 0
    fails: int = 0
    share: float = 0.0

    @property
    def total(self) -> int:
        """Number of all cells."""
        return self.waiting + self.claimed + self.done + self.crashed

    @property
    def is_finished(self) -> bool:
        """True if every cell is done or crashed."""
        return self.waiting == self.claimed == 0


@dataclass(frozen=True)
class Record:
    """A cell with its state, and its result if it is done."""

    cell: Cell
    state: str
    result: Result | None
    reason: str | None = None


def row_of(cell: Cell, result: Result) -> dict[str, Any]:
    """A result as a row of the table `results`."""
    losses = np.asarray(result.losses, dtype="<f8").tobytes()
    versions = json.dumps(dict(result.versions))
    return vars(result) | {
        "key": cell.key, "losses": losses, "versions": versions, "finished": time.time(),
    }  # fmt: skip


def record_of(row: Sequence[Any]) -> Record:
    """A record from a row of `COLUMNS`."""
    config, state, reason, *values = row
    cell, found = Cell(RunConfig.from_dict(json.loads(config))), dict(zip(OF_RESULT, values, strict=True))
    if found["verdict"] is None:
        return Record(cell, state, None, reason)
    found["losses"] = tuple(np.frombuffer(found["losses"], dtype="<f8").tolist())
    found |= {"stopped": bool(found["stopped"]), "versions": json.loads(found["versions"])}
    return Record(cell, state, Result(**found), reason)
