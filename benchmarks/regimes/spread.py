"""Spread of the last losses of runs that differ by their seed or by rounding, near the loss to get under.

    python -m benchmarks.regimes.spread TRUTH

A run of 300 steps is a forecast of the same run with another seed (replica 1) or rounding (replica 2).
Its certainty is a logistic function of its margin over `forecast.certainty.SPREAD`. Printed is the likelihood
of each spread, on the ladders that the rule is set on and on the others, and how often sure ones were right;
then how many cells at the edge the run of replica 1 is sure of.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import records_of
from benchmarks.regimes.case import NATS, STEPS, Case
from benchmarks.regimes.cases import CASES
from benchmarks.regimes.forecasts import name_of
from benchmarks.regimes.scores import Record
from normscope.forecast.certainty import MOST, SPREAD
from normscope.forecast.record import SURE

SPREADS = (0.02, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.08, 0.1)
FARTHEST = 3.0
"""Largest margin that counts, and that of a run whose loss was not finite, with the sign of a failure."""
Pair = tuple[float, bool]
"""Margin of a run, and whether another replica of it trained."""


def pairs(case: Case, runs: Sequence[Record]) -> list[Pair]:
    """The margin of replica 0 with the outcome of each other one."""
    first, *others = sorted(runs, key=lambda run: int(run["replica"]))
    margin = margin_of(case, first)
    return [(margin, run["trains"]) for run in others]


def margin_of(case: Case, run: Record) -> float:
    """Units by which a run's last losses are under the limit."""
    unit = run["own_baseline"] if case.feed.is_regression else 1.0
    under = -math.inf if run["last"] is None else (run["own_baseline"] - run["last"]) / unit
    return min(FARTHEST, max(-FARTHEST, under - NATS))


def sure_at_edge(case: Case, runs: Sequence[Record]) -> list[bool]:
    """Whether a run with another seed would be sure of a cell that is at the edge; nothing of others."""
    if len({run["trains"] for run in runs}) < 2:
        return []
    said = certainty(margin_of(case, next(run for run in runs if run["replica"] == 1)), SPREAD)
    return [max(said, 1 - said) >= SURE]


def certainty(margin: float, spread: float) -> float:
    """Probability that another replica trains."""
    return min(MOST, max(1 - MOST, 1 / (1 + math.exp(-margin / spread))))


def table(found: Sequence[Pair]) -> str:
    """A line for each spread."""
    lines = []
    for spread in SPREADS:
        said = [(certainty(margin, spread), trained) for margin, trained in found]
        likelihood = sum(math.log(p if trained else 1 - p) for p, trained in said)
        sure = [(p > 0.5) == trained for p, trained in said if max(p, 1 - p) >= SURE]
        lines.append(
            f"  {spread:g}: log-likelihood {likelihood:.1f}, {sum(sure)} of {len(sure)} sure ones right"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    cells: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for run in records_of(parser.parse_args().truth):
        cells[run["case"], run["lr"]].append(run)
    cases = {name_of(case): case for case in CASES if case.steps == STEPS}
    for is_seen, words in ((True, "set on"), (False, "not set on")):
        found = [
            pair
            for (name, _), runs in cells.items()
            if name in cases and (cases[name].part == "seen") == is_seen
            for pair in pairs(cases[name], runs)
        ]
        print(f"{words}, {len(found)} pairs of runs:\n{table(found)}")
    edges = [s for (name, _), runs in cells.items() if name in cases for s in sure_at_edge(cases[name], runs)]
    print(f"a run with another seed is sure of {sum(edges)} of {len(edges)} cells at the edge")


if __name__ == "__main__":
    main()
