"""`normscope bench remedies`: how often the first-ranked remedy rescues a held-out run in 300 training steps.

The training results, and the ranking of each cell at that time, are kept in truth.jsonl, and those
of runs on other data than bytes in regimes.jsonl. To make them:

    python -m benchmarks.remedies.grid rank
    python -m benchmarks.remedies.regimes_grid both --part held-out        # and seen

One cell is ranked again now.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import Row, records_of, row, wilson
from benchmarks.remedies.cells import Cell, held_out, read, seen, settings_of
from benchmarks.remedies.kept import Kept
from benchmarks.remedies.regimes_kept import rows_of_regimes
from normscope.forecast import forecast
from normscope.rules.remedies import REMEDIES, Rescue, try_remedies

FILE = Path(__file__).parent / "truth.jsonl"
"""Rows of kind "truth" (300 steps of a cell with some remedies or none) and "forecast" (the ranking)."""
TARGET = 0.85


def kept() -> Kept[Cell]:
    """The rows of the file; empty if it does not exist."""
    return Kept(records_of(FILE), lambda row: Cell(**row["cell"]), rankings="forecast")


def ranked_now(cell: Cell, names: Sequence[str] | None = None) -> Rescue:
    """Forecast every remedy, or these, on a cell, whatever the forecast of the unchanged cell."""
    subject, anatomy = read(cell)
    before = forecast(subject, anatomy, settings_of(cell))
    return try_remedies(subject, anatomy, settings_of(cell), before, names=names, whatever=True)


def bench_remedies() -> list[Row]:
    """Rows with figures and targets."""
    known, cells = kept(), held_out()
    each = _each(known, [*cells, *seen()])
    return [_first(known, cells), _missed(known, cells), *rows_of_regimes(), *each, _again(known, cells)]


def _first(known: Kept[Cell], cells: Sequence[Cell]) -> Row:
    """The row for the first-ranked remedy: its share of the failing cells that some remedy rescues."""
    failing = [cell for cell in cells if known.truth(cell, ()) and not known.trains(cell, ())]
    ranked = [c for c in failing if known.order(c) and known.truth(c, known.order(c)[0]) is not None]
    saved = [cell for cell in ranked if known.rescuers(cell)]
    hits = [cell for cell in saved if known.trains(cell, known.order(cell)[0])]
    low, high = wilson(len(hits), len(saved))
    missed = "; ".join(cell.words for cell in saved if cell not in hits)
    how = f"kept truth, {len(cells)} cells, {len(failing)} fail, {len(ranked)} ranked"
    return row(
        "failing held-out cells that a remedy rescues: share rescued by the first-ranked one",
        f"{len(hits)} of {len(saved)} (95 %: {low:.2f} … {high:.2f})",
        f"≥ {TARGET:g}",
        how + (f"; missed: {missed}" if missed else ""),
    )


def _missed(known: Kept[Cell], cells: Sequence[Cell]) -> Row:
    """The row for the cells that the kept ranking missed and that were ranked again."""
    again = [cell for cell in cells if known.ranked_again(cell)]
    hits = [cell for cell in again if known.trains(cell, known.ranked_again(cell))]
    how = "kept truth; they are no longer held out, as the ranking was changed after them"
    return row("cells missed above and ranked again later: rescued", f"{len(hits)} of {len(again)}", "", how)


def _each(known: Kept[Cell], cells: Sequence[Cell]) -> list[Row]:
    """A row for each remedy: how often it rescues a run in training, and how often its forecast is right."""
    rows = []
    for name in REMEDIES:
        trained = [
            c for c in cells if not known.trains(c, ()) and (known.truth(c, (name,)) or {}).get("steps")
        ]
        rescued = [cell for cell in trained if known.trains(cell, (name,))]
        told = [(_says(known, cell, name), cell in rescued) for cell in trained]
        right = [said == came for said, came in told if said is not None]
        if trained:
            what = f"{name}: rescues, of the failing cells, held out or seen, it was trained on"
            how = f"its forecast was right in {sum(right)} of {len(right)}"
            rows.append(row(what, f"{len(rescued)} of {len(trained)}", "", how))
    return rows


def _says(known: Kept[Cell], cell: Cell, name: str) -> bool | None:
    """The kept forecast of a remedy: True if it predicts a rescue, None if there is no forecast."""
    found = [a["status"] for a in known.attempts(cell) if a["names"] == [name]]
    return found[0] == "rescues" if found else None


def _again(known: Kept[Cell], cells: Sequence[Cell]) -> Row:
    """Rank the first ranked cell again, to check that the kept ranking is that of this code."""
    cell = next((cell for cell in cells if known.order(cell)), cells[0])
    best, before = ranked_now(cell).attempts[0].names, known.order(cell)
    how = "every remedy forecast in this run; the target is the kept first"
    return row(f"ranked again: {cell.words}", " + ".join(best), " + ".join(before[0]) if before else "", how)
