"""Count what changes where last losses are compared with the loss without the input on the same batches.

    python -m benchmarks.regimes.own_batches TRUTH

The other way is the loss without the input on all data. Counted are runs with another outcome, and cells at
the edge of ladders of 300 steps with three runs. Then the spread of the loss without the input over the last
20 batches of a run, for the data of each kind: its standard deviation over seeds, in nats, or as a share of
the loss for a series.
"""

import argparse
import statistics
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.process import records_of
from benchmarks.regimes.case import STEPS, Case
from benchmarks.regimes.cases import CASES
from benchmarks.regimes.forecasts import name_of
from benchmarks.regimes.scores import Record
from benchmarks.regimes.truth import REPLICAS

SEEDS = range(12)


def trains_by_all_data(case: Case, run: Record) -> bool:
    """Whether a run trains where its last losses are compared with the loss without the input on all data."""
    return run["last"] is not None and case.trains(run["last"], run["baseline"])


def is_at_edge(outcomes: list[bool]) -> bool:
    return len(set(outcomes)) > 1


def edges(truth: list[Record]) -> tuple[int, Counter[str], Counter[str]]:
    """Runs with another outcome; cells at the edge by regime, by all data and by the same batches."""
    cases = {name_of(case): case for case in CASES}
    cells: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for run in truth:
        cells[run["case"], run["lr"]].append(run)
    others, by_all, by_own = 0, Counter[str](), Counter[str]()
    for (name, _), runs in cells.items():
        case = cases[name]
        before, now = [trains_by_all_data(case, run) for run in runs], [run["trains"] for run in runs]
        others += sum(one != other for one, other in zip(before, now, strict=True))
        if case.steps == STEPS and len(runs) >= REPLICAS:
            by_all[case.regime] += is_at_edge(before)
            by_own[case.regime] += is_at_edge(now)
    return others, by_all, by_own


def spread(case: Case) -> float:
    """Standard deviation over seeds of the loss without the input on the last batches of a run."""
    found = statistics.pstdev(case.own_baseline(seed) for seed in SEEDS)
    return found / case.feed.baseline() if case.feed.is_regression else found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    truth = records_of(parser.parse_args().truth)
    others, by_all, by_own = edges(truth)
    print(f"{others} of {len(truth)} runs end otherwise than by all data")
    print(f"cells at the edge: {by_all.total()} by all data, {by_own.total()} by the same batches")
    for regime in by_all:
        print(f"  {regime}: {by_all[regime]}, {by_own[regime]}")
    print("spread of the loss without the input over the last 20 batches:")
    for case in CASES:
        if case.part in ("confirm", "confirm-2", "confirm-3") and case.steps == STEPS:
            print(f"  {name_of(case)}: {spread(case):.3f}")


if __name__ == "__main__":
    main()
