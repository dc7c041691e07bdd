"""Remedies against truth: train failing runs with each remedy for 300 steps, and rank the remedies.

    python -m benchmarks.remedies.grid train pre-ln    # the runs as they are, and with remedies
    python -m benchmarks.remedies.grid rank            # forecast every remedy, train the first-ranked
    python -m benchmarks.remedies.grid fill            # train all the rest
    python -m benchmarks.remedies.grid tune            # all of this on the cells that tuned the order
    python -m benchmarks.remedies.grid missed          # rank the missed cells again by the present ranking

Rows are appended to benchmarks/remedies/truth.jsonl; existing rows are not computed again. `normscope bench
remedies` shows the results. After a change of the forecast, delete the rows of kind "forecast" before `rank`.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.remedies.bench import FILE, kept, ranked_now
from benchmarks.remedies.cells import Cell, held_out, read, seen, truth
from normscope.rules.remedies import REMEDIES, NotApplicable, Rescue


def write(kind: str, cell: Cell, **row: Any) -> None:
    """Append a line to the file at once."""
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "cell": dataclasses.asdict(cell), **row}) + "\n")


def train(cells: Iterable[Cell], wanted: list[tuple[str, ...]]) -> None:
    """Train each cell with each of the remedies."""
    for cell in cells:
        missing = [names for names in wanted if kept().truth(cell, names) is None]
        if missing:
            subject, anatomy = read(cell)
        for names in missing:
            start = time.perf_counter()
            try:
                row = truth(cell, names, subject, anatomy)
            except NotApplicable as error:
                row = {"not_applicable": error.reason}
            write("truth", cell, names=list(names), seconds=round(time.perf_counter() - start, 1), **row)
            print(cell.words, names, row, flush=True)


def rank(cells: Iterable[Cell]) -> None:
    """Forecast all remedies on the cells that fail, and train with the first-ranked."""
    for cell in cells:
        train([cell], [()])
        if kept().trains(cell, ()):
            continue
        if kept().ranking(cell) is None:
            _forecast(cell)
        for names in kept().order(cell):  # until one rescues: the cell counts only if one does
            train([cell], [names])
            if kept().trains(cell, names):
                break


def missed(cells: Iterable[Cell]) -> None:
    """Rank the cells again that the first-ranked remedy of the kept ranking does not rescue.

    Only remedies whose kept trial rescues are tried, and those without one: the short trials are the same.
    """
    for cell in cells:
        first = kept().order(cell)[:1]
        if not first or kept().trains(cell, first[0]) or kept().ranked_again(cell):
            continue
        fails = {tuple(a["names"]) for a in kept().attempts(cell) if a["status"] != "rescues"}
        names = [name for name in REMEDIES if (name,) not in fails]
        start = time.perf_counter()
        attempts = _attempts(ranked_now(cell, names))
        seconds = round(time.perf_counter() - start, 1)
        write("again", cell, seconds=seconds, attempts=attempts)
        print(cell.words, [(a["names"], a["status"], a["certainty"]) for a in attempts], flush=True)
        train([cell], [tuple(attempts[0]["names"])])


def _attempts(rescue: Rescue) -> list[dict[str, Any]]:
    return [
        {
            "names": list(attempt.names),
            "status": attempt.status,
            "score": None if attempt.forecast is None else attempt.forecast.score,
            "certainty": None if attempt.forecast is None else attempt.forecast.certainty,
            "longer": attempt.longer,
            "reason": attempt.reason,
        }
        for attempt in rescue.attempts
    ]


def _forecast(cell: Cell) -> None:
    start = time.perf_counter()
    attempts = _attempts(ranked_now(cell))
    write("forecast", cell, seconds=round(time.perf_counter() - start, 1), attempts=attempts)
    print(cell.words, [(a["names"], a["status"], a["score"]) for a in attempts], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train").add_argument("names", nargs="*")
    commands.add_parser("rank")
    commands.add_parser("fill")
    commands.add_parser("tune")
    commands.add_parser("missed")
    options = parser.parse_args()
    cells = held_out()
    if options.command == "train":
        train(cells, [(), *((name,) for name in options.names)])
    elif options.command == "rank":
        rank(cells)
    elif options.command == "missed":
        missed(cells)
    else:
        _fill(seen() if options.command == "tune" else cells)


def _fill(cells: list[Cell]) -> None:
    """Train every cell that fails with every remedy."""
    for cell in cells:
        train([cell], [()])
        if not kept().trains(cell, ()):
            train([cell], [(name,) for name in REMEDIES])
            if cell.text != "licences" and kept().ranking(cell) is None:
                _forecast(cell)


if __name__ == "__main__":
    main()
