"""The kept lines of regimes.jsonl, as rows of `normscope bench remedies`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import Row, records_of, row, wilson
from benchmarks.remedies.kept import Kept, Line
from benchmarks.remedies.regimes import FRESH, HELD_OUT, REGIMES, SEEN, FailingRun

FILE = Path(__file__).parent / "regimes.jsonl"
"""Lines of kind "ranking" (every remedy forecast on a run) and "truth" (300 steps of a run with some)."""
TARGET = 0.9


def known() -> Kept[FailingRun]:
    """The lines of the file; none if it is not there."""
    return of_lines(records_of(FILE))


def of_lines(lines: Sequence[Line]) -> Kept[FailingRun]:
    """Lines as the file has them."""
    return Kept(lines, lambda line: FailingRun(line["run"], line["lr"]))


def add(kind: str, run: FailingRun, **line: Any) -> None:
    """Append a line to the file at once."""
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "run": run.ladder, "lr": run.lr, **line}) + "\n")


def rows_of_regimes() -> list[Row]:
    """A row for each regime and part, and one for all that is held out."""
    lines = known()
    rows = [_row(lines, "all four", "held-out", HELD_OUT), _row(lines, "all four", "fresh", FRESH)]
    for part, runs in (("held-out", HELD_OUT), ("fresh", FRESH), ("seen", SEEN)):
        for regime in REGIMES:
            rows.append(_row(lines, regime, part, [run for run in runs if run.regime == regime]))
    return rows


def _row(lines: Kept[FailingRun], regime: str, part: str, runs: Sequence[FailingRun]) -> Row:
    judged = [run for run in runs if lines.is_judged(run)]
    hits = [run for run in judged if lines.is_rescued(run)]
    foreseen = [run for run in judged if lines.is_foreseen(run)]
    able = [run for run in judged if lines.rescuers(run)]
    low, high = wilson(len(hits), len(judged))
    others = [line for run in judged if (line := lines.another(run)) is not None]
    missed = "; ".join(run.words for run in judged if run not in hits)
    how = (
        f"kept truth, {len(runs)} runs, {len(judged)} ranked; {len(foreseen)} are forecast to fail, and "
        f"{sum(run in hits for run in foreseen)} of these are rescued; some remedy rescues {len(able)}; with "
        f"another seed {sum(line.get('trains', False) for line in others)} of {len(others)} train"
    )
    return row(
        f"{regime}, {part}: failing runs that the first-ranked remedy rescues",
        f"{len(hits)} of {len(judged)} (95 %: {low:.2f} … {high:.2f})",
        f"≥ {TARGET:g}" if part != "seen" else "",
        how + (f"; missed: {missed}" if missed else ""),
    )
