"""The kept lines of remedies_regimes.jsonl, as rows of `normscope bench remedies`."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import Row, records_of, row, wilson
from benchmarks.remedies_regimes import HELD_OUT, REGIMES, SEEN, FailingRun

FILE = Path(__file__).parent / "remedies_regimes.jsonl"
"""Lines of kind "ranking" (every remedy forecast on a run) and "truth" (300 steps of a run with some)."""
TARGET = 0.9


@dataclass(frozen=True)
class Known:
    """Lines of `FILE`; of several for the same, the last counts."""

    lines: Sequence[dict[str, Any]]

    def _of(self, kind: str, run: FailingRun) -> list[dict[str, Any]]:
        wanted = (kind, run.ladder, run.lr)
        return [line for line in self.lines if (line["kind"], line["run"], line["lr"]) == wanted]

    def truth(self, run: FailingRun, names: Iterable[str]) -> dict[str, Any] | None:
        """Result of 300 steps with these remedies; None if they were not run."""
        found = [line for line in self._of("truth", run) if line["names"] == list(names)]
        return found[-1] if found else None

    def trains(self, run: FailingRun, names: Iterable[str]) -> bool:
        """True if the run trains with these remedies."""
        line = self.truth(run, names)
        return line is not None and line.get("trains", False)

    def ranking(self, run: FailingRun) -> dict[str, Any] | None:
        """The ranking of a run."""
        found = self._of("ranking", run)
        return found[-1] if found else None

    def order(self, run: FailingRun) -> list[tuple[str, ...]]:
        """The remedies that apply, by rank."""
        line = self.ranking(run) or {"attempts": []}
        return [tuple(a["names"]) for a in line["attempts"] if a["status"] != "not applicable"]

    def is_judged(self, run: FailingRun) -> bool:
        """True if the first-ranked remedy was trained; a run on which none applies is missed."""
        order = self.order(run)
        return self.ranking(run) is not None and (not order or self.truth(run, order[0]) is not None)

    def is_rescued(self, run: FailingRun) -> bool:
        """True if the first-ranked remedy rescues the run."""
        order = self.order(run)
        return bool(order) and self.trains(run, order[0])

    def is_foreseen(self, run: FailingRun) -> bool:
        """True if the forecast says that the unchanged run fails, so that `check` tries remedies."""
        line = self.ranking(run)
        return line is not None and line["before"] in ("collapses", "plateau", "diverges", "needs-warmup")

    def can_be_rescued(self, run: FailingRun) -> bool:
        """True if some remedy that was trained rescues the run."""
        return any(line.get("trains") for line in self._of("truth", run))


def known() -> Known:
    """The lines of the file; none if it is not there."""
    return Known(records_of(FILE))


def add(kind: str, run: FailingRun, **line: Any) -> None:
    """Append a line to the file at once."""
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "run": run.ladder, "lr": run.lr, **line}) + "\n")


def rows_of_regimes() -> list[Row]:
    """A row for each regime and part, and one for all that is held out."""
    lines = known()
    rows = [_row(lines, "all four", "held-out", HELD_OUT)]
    for part, runs in (("held-out", HELD_OUT), ("seen", SEEN)):
        for regime in REGIMES:
            rows.append(_row(lines, regime, part, [run for run in runs if run.regime == regime]))
    return rows


def _row(lines: Known, regime: str, part: str, runs: Sequence[FailingRun]) -> Row:
    judged = [run for run in runs if lines.is_judged(run)]
    hits = [run for run in judged if lines.is_rescued(run)]
    foreseen = [run for run in judged if lines.is_foreseen(run)]
    able = [run for run in judged if lines.can_be_rescued(run)]
    low, high = wilson(len(hits), len(judged))
    missed = "; ".join(run.words for run in judged if run not in hits)
    how = (
        f"kept truth, {len(runs)} runs, {len(judged)} ranked; {len(foreseen)} are forecast to fail, and "
        f"{sum(run in hits for run in foreseen)} of these are rescued; some remedy rescues {len(able)}"
    )
    return row(
        f"{regime}, {part}: failing runs that the first-ranked remedy rescues",
        f"{len(hits)} of {len(judged)} (95 %: {low:.2f} … {high:.2f})",
        f"≥ {TARGET:g}" if part == "held-out" else "",
        how + (f"; missed: {missed}" if missed else ""),
    )
