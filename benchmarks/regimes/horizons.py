"""The length of a trial that names the best rate, and the number of runs that fail after 300 steps.

    python -m benchmarks.regimes.horizons TRUTH

Nothing is forecast: both are read from the curves of the runs that were trained, the means over 20 steps. The
first table names, for each number of steps, the rate of replica 0 with the lowest loss at that point, or with
the lowest loss that `best_rate.KEPT` extrapolates from half of it. Rates that do not train in any replica are
left out, so that these figures are a bound for a forecast that knows which rates train. The second table has
the cells that are right if a run is said to train where its loss is then `UNDER` the one without the input.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.process import EVERY, records_of
from benchmarks.regimes.best_rates import NEAR
from benchmarks.regimes.case import NATS, STEPS
from benchmarks.regimes.truth import REPLICAS
from normscope.forecast.best_rate import KEPT, lowest

LOST = 0.3
"""Nats above the lowest loss of a run at its end that count as lost."""
UNDER = 0.02
"""Nats under the loss without the input from which a run is said to train."""
WINDOWS = (2, 3, 5, 6, 8, 12)
Run = dict[str, Any]


class Later(NamedTuple):
    """Runs longer than 300 steps: those that train by then, and those of them that fail or lose later."""

    trained: int
    failed: int
    lost: int


def complete(truth: Sequence[Run]) -> list[dict[float, list[Run]]]:
    """The runs of each ladder with all replicas, by learning rate, in the order of the replicas."""
    by_ladder: dict[str, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(truth, key=lambda run: int(run["replica"])):
        by_ladder[run["case"]][run["lr"]].append(run)
    return [
        dict(runs)
        for runs in by_ladder.values()
        if all(len(each) == REPLICAS for each in runs.values())
        and any(all(run["trains"] for run in each) for each in runs.values())
    ]


def is_near(
    ladder: Mapping[float, Sequence[Run]],
    windows: int,
    kept: float | None,
    rates: Collection[float] | None = None,
) -> bool:
    """Whether the rate that is best after `windows` × 20 steps is within ×2 of the best ones of the replicas.

    Args:
        kept: share of the last doubling that each further one has; None takes the loss as it is.
        rates: those that may be named; all by default.
    """
    losses = {}
    for rate, runs in ladder.items():
        if rates is not None and rate not in rates:
            continue
        curve = runs[0]["curve"][:windows]
        if len(curve) == windows and None not in curve and any(run["trains"] for run in runs):
            losses[rate] = curve[-1] if kept is None else _at_the_end(curve, kept)
    if not losses:
        return False
    named = sorted(losses)
    said = 2 ** lowest([math.log2(rate) for rate in named], [losses[rate] for rate in named])
    best = [_best(ladder, number) for number in range(REPLICAS)]
    return min(best) / NEAR <= said <= max(best) * NEAR


def _at_the_end(curve: Sequence[float], kept: float) -> float:
    """The loss after 300 steps, extrapolated from the second half of a curve of means over 20 steps."""
    half = max(1.0, len(curve) / 2)
    before, share = curve[int(half) - 1], half - int(half)
    before += share * (curve[min(int(half), len(curve) - 1)] - before)
    start, now = (half - 0.5) * EVERY, (len(curve) - 0.5) * EVERY
    times = kept * math.log2((STEPS - EVERY / 2) / now) / math.log2(now / start)
    if min(before, curve[-1]) <= 0:
        return float(curve[-1] - times * (before - curve[-1]))
    return float(curve[-1] * (curve[-1] / before) ** times)


def _best(ladder: Mapping[float, Sequence[Run]], number: int) -> float:
    """The rate with the lowest last loss of a replica."""
    ended = [rate for rate, runs in ladder.items() if runs[number]["last"] is not None]
    return min(ended, key=lambda rate: float(ladder[rate][number]["last"]))


def by_loss(truth: Sequence[Run], windows: int) -> dict[str, tuple[int, int]]:
    """The cells that the loss after `windows` × 20 steps decides rightly, and all cells, by regime.

    A cell counts if all of its replicas end alike; the loss is that of the first one.
    """
    cells: dict[tuple[str, float], list[Run]] = defaultdict(list)
    for run in sorted(truth, key=lambda run: int(run["replica"])):
        cells[run["case"], run["lr"]].append(run)
    found: dict[str, tuple[int, int]] = {}
    for (case, _), runs in cells.items():
        if len(runs) < REPLICAS or len({run["trains"] for run in runs}) > 1:
            continue
        loss = next(iter(runs[0]["curve"][windows - 1 : windows]), None)
        said = loss is not None and loss < runs[0]["baseline"] - UNDER
        regime = case.split(":")[0]
        right, cells_of = found.get(regime, (0, 0))
        found[regime] = right + (said == runs[0]["trains"]), cells_of + 1
    return found


def later(truth: Sequence[Run]) -> Later:
    """The runs that are under the loss without the input at step 300, and those of them that then fail."""
    trained = failed = lost = 0
    for run in truth:
        curve, limit = run["curve"], run["baseline"] - NATS
        at = STEPS // EVERY
        if len(curve) <= at or curve[at - 1] is None or curve[at - 1] > limit:
            continue
        end = math.inf if run["last"] is None else run["last"]
        trained, failed = trained + 1, failed + (end > limit)
        lost += end <= limit and end > min(loss for loss in curve if loss is not None) + LOST
    return Later(trained, failed, lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    options = parser.parse_args()
    truth = records_of(options.truth)
    short = [run for run in truth if len(run["curve"]) <= STEPS // EVERY]
    ladders = complete(short)
    print(f"{len(ladders)} ladders of {STEPS} steps; best rate within ×{NEAR:g} after")
    for windows in range(2, STEPS // EVERY):
        plain, further = (sum(is_near(ladder, windows, kept) for ladder in ladders) for kept in (None, KEPT))
        print(f"  {windows * EVERY} steps: {plain}, extrapolated {further}")
    print(f"cells right by a loss {UNDER:g} under the one without the input, by regime, after")
    for windows in WINDOWS:
        shown = (f"{regime} {right} of {n}" for regime, (right, n) in by_loss(short, windows).items())
        print(f"  {windows * EVERY} steps: {', '.join(shown)}")
    found = later(truth)
    print(
        f"of {found.trained} longer runs that train by step {STEPS}, {found.failed} do not at their end, and "
        f"{found.lost} more have lost {LOST} nats"
    )


if __name__ == "__main__":
    main()
