"""`normscope bench remedies`: does the first-ranked remedy rescue a run? By 300 real steps, held out."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import normscope
from normscope.bench.remedies_cells import Cell

FILE = Path(normscope.__file__).parents[2] / "benchmarks" / "remedies.jsonl"
"""Kept rows, written by benchmarks/remedies.py: the truth of a run, and the ranking of its remedies."""
TARGET = 0.85


@dataclass(frozen=True)
class Kept:
    """Rows of `FILE`."""

    rows: Sequence[dict[str, Any]]

    def _of(self, kind: str, cell: Cell) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind and Cell(**row["cell"]) == cell]

    def truth(self, cell: Cell, names: Iterable[str]) -> dict[str, Any] | None:
        """What came of 300 steps with these remedies; None where that was not run."""
        found = [row for row in self._of("truth", cell) if row["names"] == list(names)]
        return found[-1] if found else None

    def trains(self, cell: Cell, names: Iterable[str]) -> bool:
        """Whether these remedies make (or, none of them, the cell as it is makes) a run that trains."""
        row = self.truth(cell, names)
        return row is not None and row.get("trains", False)

    def ranking(self, cell: Cell) -> dict[str, Any] | None:
        """The forecast row of a cell."""
        found = self._of("forecast", cell)
        return found[-1] if found else None

    def order(self, cell: Cell) -> list[tuple[str, ...]]:
        """The remedies that apply, the first-ranked first."""
        row = self.ranking(cell)
        applied = [a for a in row["attempts"] if a["status"] != "not applicable"] if row else []
        return [tuple(attempt["names"]) for attempt in applied]

    def rescuers(self, cell: Cell) -> list[tuple[str, ...]]:
        """All that were seen to rescue a cell."""
        return [tuple(r["names"]) for r in self._of("truth", cell) if r["names"] and r.get("trains")]


def kept() -> Kept:
    """The rows that are there; none where the file is not."""
    if not FILE.exists():
        return Kept(())
    return Kept([json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()])
