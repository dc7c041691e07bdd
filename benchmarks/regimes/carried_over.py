"""Comparison of the learning rate for 300 steps at a constant rate with the best one of other runs.

    python -m benchmarks.regimes.carried_over TRUTH
    python -m benchmarks.regimes.carried_over TRUTH --other OTHER [--forecasts FORECASTS]

The first form takes the longer runs of `TRUTH`: the best rate after their first 300 steps, and the best one
at their end. The second takes runs of another length or schedule in `OTHER`: their best rate, and that of
replica 0 of the same ladder in `TRUTH`, or the one that a forecast names. Ladders of which no run trains are
left out. `benchmarks.regimes.truth` makes such runs, with `--steps` or `--schedule cosine`; there are some in
`cosine-300.jsonl`.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.process import EVERY, records_of, wilson
from benchmarks.regimes.best_rates import NEAR, named, share_lost
from benchmarks.regimes.case import STEPS
from benchmarks.regimes.scores import ladders

Run = dict[str, Any]
Runs = Mapping[float, Run]
"""Learning rate → run of one replica of a ladder, in ascending order."""


class Carried(NamedTuple):
    """A rate, the best one of other runs of the same ladder, and what is lost there with the first.

    Attributes:
        lost: share of the fall of the loss, see `share_lost`.
    """

    name: str
    rate: float
    best: float
    lost: float | None

    @property
    def is_near(self) -> bool:
        return 1 / NEAR <= self.rate / self.best <= NEAR


def by_replica(truth: Sequence[Run]) -> dict[tuple[str, int], Runs]:
    """The runs of each replica of each ladder."""
    found: dict[tuple[str, int], dict[float, Run]] = defaultdict(dict)
    for run in sorted(truth, key=lambda run: float(run["lr"])):
        found[run["case"], run["replica"]][run["lr"]] = run
    return dict(found)


def lasts(runs: Runs) -> dict[float, float]:
    """The last losses that are finite."""
    return {rate: run["last"] for rate, run in runs.items() if run["last"] is not None}


def early(runs: Runs) -> dict[float, float]:
    """The mean losses of the last 20 of the first 300 steps."""
    place = STEPS // EVERY - 1
    found = {rate: run["curve"][place] for rate, run in runs.items() if len(run["curve"]) > place}
    return {rate: loss for rate, loss in found.items() if loss is not None}


def carried(name: str, rate: float, runs: Runs) -> Carried | None:
    """Comparison of a rate with the best one of other runs; None if none of them trains."""
    losses = lasts(runs)
    if not any(run["trains"] for run in runs.values()):
        return None
    best = min(losses, key=losses.__getitem__)
    return Carried(name, rate, best, share_lost(rate, losses, next(iter(runs.values()))["baseline"]))


def of_longer_runs(truth: Sequence[Run]) -> list[Carried]:
    """The rate that is best after 300 steps of a longer run, at its end; for each replica."""
    found = []
    for (name, _), runs in by_replica(truth).items():
        if losses := early(runs) if max(len(run["curve"]) for run in runs.values()) > STEPS // EVERY else {}:
            found.append(carried(name, min(losses, key=losses.__getitem__), runs))
    return [each for each in found if each is not None]


def of_others(rates: Mapping[str, float], others: Sequence[Run]) -> list[Carried]:
    """The rate of each ladder, in other runs."""
    found = [
        carried(name, rates[name], runs) for (name, _), runs in by_replica(others).items() if name in rates
    ]
    return [each for each in found if each is not None]


def best_of(truth: Sequence[Run]) -> dict[str, float]:
    """The best rate of replica 0 of each ladder, if a run trains."""
    found = {}
    for (name, replica), runs in by_replica(truth).items():
        losses = lasts(runs)
        if replica == 0 and any(run["trains"] for run in runs.values()):
            found[name] = min(losses, key=losses.__getitem__)
    return found


def named_of(truth: Sequence[Run], forecasts: Sequence[Run]) -> dict[str, float]:
    """The rate to use that each forecast names, if it names one."""
    rates = {ladder.name: named(ladder).said.rate for ladder in ladders(truth, forecasts, 1)[0]}
    return {name: rate for name, rate in rates.items() if rate is not None}


def table(found: Sequence[Carried]) -> str:
    """The figures by regime and in all, and the ladders that are not near."""
    if not found:
        return "there is no ladder of which a run trains"
    by_regime: dict[str, list[Carried]] = defaultdict(list)
    for each in found:
        by_regime[each.name.split(":")[0]].append(each)
    lines = []
    for regime, group in [*by_regime.items(), ("all", list(found))]:
        near = sum(each.is_near for each in group)
        low, high = wilson(near, len(group))
        lost = [each.lost for each in group if each.lost is not None]
        factors = statistics.geometric_mean(each.best / each.rate for each in group)
        median = f"{100 * statistics.median(lost):.1f} %" if lost else "an unknown share"
        lines.append(
            f"{regime}: within ×{NEAR:g} on {near} of {len(group)} ({100 * low:.0f} to {100 * high:.0f} %); "
            f"the best is ×{factors:.2f} of the rate (geometric mean); "
            f"{median} of the fall lost (median), at most 5 % on "
            f"{sum(each <= 0.05 for each in lost)}"
        )
    lines += [f"  {each.name}: {each.rate:g}, best {each.best:g}" for each in found if not each.is_near]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--forecasts", type=Path)
    options = parser.parse_args()
    truth = records_of(options.truth)
    if options.other is None:
        print(table(of_longer_runs(truth)))
        return
    rates = named_of(truth, records_of(options.forecasts)) if options.forecasts else best_of(truth)
    print(table(of_others(rates, records_of(options.other))))


if __name__ == "__main__":
    main()
