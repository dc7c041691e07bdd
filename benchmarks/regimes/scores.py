"""Score the forecasts of the regimes against the runs that were trained.

    python -m benchmarks.regimes.scores TRUTH FORECASTS [--cells] [--again] [--replicas N] [--part PART …]

A cell is one ladder at one learning rate. It trained if all three of its replicas trained, and failed if none
did. The others are at the edge: whether they train hangs on the seed or on rounding, and no forecast of them
is right or wrong. Ladders with fewer trained replicas than `--replicas`, three by default, are left out, and
listed.
"""

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import EVERY, records_of, wilson
from benchmarks.regimes.case import PARTS
from benchmarks.regimes.judged import judge, of_parts
from benchmarks.regimes.truth import REPLICAS
from normscope.forecast.record import SURE

STEPS = 300
"""Steps of a run with whose time a forecast's is compared."""
NEAR = 1.5
"""Largest factor between two learning rates that count as the same."""
BINS = 10
KNOWN = ("trains", "needs-warmup", "collapses", "plateau", "diverges", "slow")
"""Outcomes that predict; the others leave it open."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One learning rate of a ladder: its forecast, and its runs in the order of the replicas."""

    forecast: Record
    runs: tuple[Record, ...]

    @property
    def truth(self) -> str:
        """ "trained", "failed" or "edge"."""
        trained = sum(run["trains"] for run in self.runs)
        return "trained" if trained == len(self.runs) else "edge" if trained else "failed"

    @property
    def is_open(self) -> bool:
        """Whether the forecast predicts nothing."""
        return self.forecast["outcome"] not in KNOWN

    @property
    def is_right(self) -> bool:
        """Whether the forecast predicts what all replicas did."""
        said = "trained" if self.forecast["outcome"] == "trains" else "failed"
        return not self.is_open and said == self.truth

    @property
    def certainty(self) -> float | None:
        """Probability that the run trains, by the forecast."""
        found: float | None = self.forecast.get("certainty")
        return found

    @property
    def is_sure(self) -> bool:
        """Whether the forecast is sure either way."""
        return self.certainty is not None and max(self.certainty, 1 - self.certainty) >= SURE


@dataclass(frozen=True)
class Scored:
    """The cells of one model, ascending in the learning rate."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def regime(self) -> str:
        return self.name.split(":")[0]

    @property
    def largest(self) -> float:
        """The predicted largest learning rate that trains; 0 without any."""
        return _largest(cell.forecast["lr"] for cell in self.cells if cell.forecast["outcome"] == "trains")

    @property
    def largest_of_replicas(self) -> tuple[float, ...]:
        """The largest learning rate that trains, by replica; 0 without any."""
        return tuple(
            _largest(cell.forecast["lr"] for cell in self.cells if cell.runs[number]["trains"])
            for number in range(len(self.cells[0].runs))
        )

    @property
    def largest_is_right(self) -> bool:
        """Whether the predicted largest learning rate that trains is that of a replica, or between two."""
        trained = self.largest_of_replicas
        return min(trained) / NEAR <= self.largest <= max(trained) * NEAR

    @property
    def cost(self) -> float:
        """Time of a forecast as a share of 300 steps, both for each learning rate of a ladder."""
        runs = [run for cell in self.cells for run in cell.runs]
        steps = EVERY * max(1, *(len(run["curve"]) for run in runs))
        trained = sum(run["seconds"] for run in runs) / len(runs) * STEPS / steps
        return float(self.cells[0].forecast["seconds"] / trained)

    @property
    def steps(self) -> float:
        """Training steps of the longest trial of each rate, as a share of 300 for each."""
        taken = sum(cell.forecast["curve"][-1]["step"] for cell in self.cells if cell.forecast["curve"])
        return float(taken / STEPS / len(self.cells))


def _largest(rates: Any) -> float:
    """The largest of learning rates; 0 without any."""
    return max(rates, default=0.0)


def ladders(
    truth: Sequence[Record], forecasts: Sequence[Record], least: int = REPLICAS
) -> tuple[list[Scored], list[str]]:
    """The ladders that were forecast and trained, and the names of those with fewer than `least` replicas."""
    runs: dict[tuple[str, float], dict[int, Record]] = defaultdict(dict)
    for run in truth:
        runs[run["case"], run["lr"]][run["replica"]] = run
    rungs: dict[str, list[Record]] = defaultdict(list)
    for rung in forecasts:
        rungs[rung["case"]].append(rung)
    found, incomplete = [], []
    for name, each in rungs.items():
        if any(len(runs[name, rung["lr"]]) < least for rung in each):
            incomplete.append(name)
            continue
        cells = [Cell(r, tuple(run for _, run in sorted(runs[name, r["lr"]].items()))) for r in each]
        found.append(Scored(name, tuple(sorted(cells, key=lambda cell: float(cell.forecast["lr"])))))
    return found, incomplete


def figures(found: Sequence[Scored]) -> Record:
    """The figures of some ladders."""
    cells = [cell for ladder in found for cell in ladder.cells]
    settled = [cell for cell in cells if cell.truth != "edge"]
    edges = [cell for cell in cells if cell.truth == "edge"]
    right = sum(cell.is_right for cell in settled)
    sure = [cell for cell in settled if cell.is_sure and cell.certainty is not None]
    return {
        "ladders": len(found),
        "cells": len(settled),
        "right": right,
        "interval": wilson(right, len(settled)),
        "wrong": sum(not cell.is_open and not cell.is_right for cell in settled),
        "open": sum(cell.is_open for cell in settled),
        "largest rates": sum(ladder.largest_is_right for ladder in found),
        "cost": sum(ladder.cost for ladder in found) / max(1, len(found)),
        "steps": statistics.median([ladder.steps for ladder in found] or [0.0]),
        "edge cells": len(edges),
        "sure": len(sure),
        "sure and right": sum((cell.truth == "trained") == ((cell.certainty or 0.0) > 0.5) for cell in sure),
        "sure at the edge": sum(cell.is_sure for cell in edges),
        "expected at the edge": sum(_chance_of_edge(cell) for cell in [*sure, *edges] if cell.is_sure),
    }


def _chance_of_edge(cell: Cell) -> float:
    """Probability that the replicas of a cell differ, if each trains with the forecast's probability."""
    p, num = cell.certainty or 0.0, len(cell.runs)
    return 1 - p**num - (1 - p) ** num


def calibration(found: Sequence[Scored]) -> list[tuple[float, float, int]]:
    """Mean certainty, share of runs that trained, and number of cells, for each tenth of the certainty."""
    bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for cell in (cell for ladder in found for cell in ladder.cells):
        if cell.certainty is not None:
            trained = sum(run["trains"] for run in cell.runs) / len(cell.runs)
            bins[min(BINS - 1, int(cell.certainty * BINS))].append((cell.certainty, trained))
    return [
        (sum(c for c, _ in each) / len(each), sum(t for _, t in each) / len(each), len(each))
        for _, each in sorted(bins.items())
    ]


def brier(found: Sequence[Scored]) -> float:
    """Mean square of the certainty's distance to what happened, over runs; 0.25 for a coin."""
    pairs = [
        (cell.certainty, run["trains"])
        for ladder in found
        for cell in ladder.cells
        if cell.certainty is not None
        for run in cell.runs
    ]
    return sum((certainty - trained) ** 2 for certainty, trained in pairs) / len(pairs) if pairs else math.nan


def table(found: Sequence[Scored], incomplete: Sequence[str]) -> str:
    """The figures by regime, as text."""
    by_regime: Mapping[str, list[Scored]] = defaultdict(list)
    for ladder in found:
        by_regime[ladder.regime].append(ladder)
    lines = []
    for name, each in [*by_regime.items(), *([("all", list(found))] if len(by_regime) > 1 else [])]:
        f = figures(each)
        low, high = f["interval"]
        lines.append(
            f"{name}: {f['right']} of {f['cells']} cells right ({100 * low:.0f} to {100 * high:.0f} %), "
            f"{f['wrong']} wrong, {f['open']} open; largest learning rate within ×{NEAR:g} on "
            f"{f['largest rates']} of {f['ladders']} ladders; cost {100 * f['cost']:.1f} % of {STEPS} steps, "
            f"{100 * f['steps']:.0f} % of their number (median); "
            f"{f['edge cells']} cells at the edge; sure {f['sure']}, of which right {f['sure and right']}; "
            f"sure at the edge {f['sure at the edge']}, by the probabilities {f['expected at the edge']:.1f}"
        )
        reasons = Counter(
            f"{cell.forecast['outcome']}: {cell.forecast['reason']}"
            for ladder in each
            for cell in ladder.cells
            if cell.is_open and name != "all"
        )
        lines += [f"  {count} × {reason}" for reason, count in reasons.most_common(5)]
    lines += [f"not all replicas were trained: {name}" for name in incomplete]
    tenths = calibration(found)
    if tenths:
        lines.append(f"calibration (Brier score {brier(found):.3f}): certainty, share that trained, cells")
        lines += [f"  {said:.2f}  {was:.2f}  {count}" for said, was, count in tenths]
    return "\n".join(lines)


def cells_of(ladder: Scored) -> str:
    """The cells of a ladder that are not right, as text."""
    wrong = []
    for cell in ladder.cells:
        if cell.truth == "edge" or cell.is_right:
            continue
        gaps = [None if r["last"] is None else round(r["last"] - r["own_baseline"], 2) for r in cell.runs]
        wrong.append(f"  {cell.forecast['lr']:g}: {cell.forecast['outcome']}, {cell.truth} {gaps}")
    return "\n".join([f"{ladder.name}: {len(wrong)} not right", *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    parser.add_argument("--cells", action="store_true", help="also the cells that are not right")
    parser.add_argument(
        "--again", action="store_true", help="judge the measurements by the rule as it is now"
    )
    parser.add_argument("--replicas", type=int, default=REPLICAS, help="fewest trained runs of a cell")
    parser.add_argument("--part", choices=PARTS, action="append", default=[])
    options = parser.parse_args()
    forecasts = of_parts(records_of(options.forecasts), options.part)
    if options.again:
        forecasts = judge(forecasts)
    found, incomplete = ladders(records_of(options.truth), forecasts, options.replicas)
    if options.cells:
        print("\n".join(map(cells_of, found)))
    print(table(found, incomplete))


if __name__ == "__main__":
    main()
