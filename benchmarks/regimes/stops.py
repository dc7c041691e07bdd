"""Early stops of a ladder: what they change, how right larger rates are, and how often half a trial is hasty.

    python -m benchmarks.regimes.forecasts WHOLE --part seen --whole
    python -m benchmarks.regimes.forecasts STOPPED --part seen
    python -m benchmarks.regimes.stops TRUTH WHOLE STOPPED

WHOLE and STOPPED are forecasts of the same ladders, without and with the stops of `forecast.stopping`.
Cells whose replicas disagree are no evidence, except for the counts of runs.
"""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.process import records_of
from benchmarks.regimes.judged import forecast_of
from benchmarks.regimes.scores import Cell, Scored, figures, ladders
from normscope.forecast import Forecast
from normscope.forecast.ladder import SOONER, ahead
from normscope.forecast.rule import Decision
from normscope.forecast.stopping import LOW, REACHES_BARELY, certainty_by_larger, decided_by_larger


class Seen(NamedTuple):
    """A low rate that was not looked at: what larger rates predict and decide, and what happened."""

    above: float
    """Predicted loss minus that of the runs, in units of the loss to beat; nan if a run diverged."""
    outcome: str
    """Decision of the larger rates, "open" without one; "barely trains" where it is not sure."""
    truth: str


def seen_by_larger(ladder: Scored) -> Iterator[Seen]:
    """Low rates of a ladder of whole trials that larger rates predict, as if no low rate had been tried."""
    rungs = [(cell, forecast_of(cell.forecast)) for cell in ladder.cells]
    largest = max(rung.lr for _, rung in rungs)
    main = [rung for _, rung in rungs if rung.lr > LOW * largest and rung.curve and not rung.failed]
    for cell, rung in rungs:
        loss, baseline = ahead(rung.lr, None, main, SOONER), rung.baseline
        if rung.lr > LOW * largest or loss is None or baseline.loss is None or rung.hidden:
            continue
        decision = decided_by_larger(loss, main[0].curve[0].loss, baseline, tokens=rung.tokens)
        ends = [run["last"] for run in cell.runs]
        gap = math.nan if None in ends else (loss - statistics.fmean(ends)) / baseline.unit
        yield Seen(gap, _in_words(decision), cell.truth)


def _in_words(decision: Decision | None) -> str:
    if decision is None:
        return "open"
    return "barely trains" if certainty_by_larger(decision) == REACHES_BARELY else decision.outcome


def hasty(cell: Cell) -> bool:
    """Whether a trial compared gradients half-way, and went on."""
    rung = forecast_of(cell.forecast)
    return any(look.step == rung.steps // 2 and look.coherence is not None for look in rung.curve[:-1])


def steps(rungs: Sequence[Forecast]) -> int:
    """Training steps of trials."""
    return sum(rung.curve[-1].step for rung in rungs if rung.curve)


def report(whole: Sequence[Scored], stopped: Sequence[Scored]) -> Iterator[str]:
    """The figures, as lines of text."""
    for name, each in (("whole trials", whole), ("early stops", stopped)):
        found = figures(each)
        taken = sum(steps([forecast_of(cell.forecast) for cell in ladder.cells]) for ladder in each)
        yield (
            f"{name}: {found['right']} of {found['cells']} cells right, largest rate on "
            f"{found['largest rates']} of {found['ladders']} ladders, sure {found['sure']}, of which right "
            f"{found['sure and right']}; {taken} steps"
        )
    seen = [each for ladder in whole for each in seen_by_larger(ladder)]
    for outcome in ("trains", "barely trains", "slow", "open"):
        counts = Counter(each.truth for each in seen if each.outcome == outcome)
        yield f"larger rates say {outcome}: " + ", ".join(
            f"{n} {truth}" for truth, n in sorted(counts.items())
        )
    gaps = [each.above for each in seen if not math.isnan(each.above)]
    if gaps:
        yield f"their prediction is too high by {statistics.median(gaps):.2f} (median of {len(gaps)} cells)"
    untried = [cell for ladder in stopped for cell in ladder.cells if not cell.forecast["curve"]]
    counts = Counter(f"{cell.forecast['outcome']}, {cell.truth}" for cell in untried)
    yield "not tried: " + "; ".join(f"{n} {each}" for each, n in sorted(counts.items()))
    counts = Counter(cell.truth for ladder in stopped for cell in ladder.cells if hasty(cell))
    yield "half-trials that went on: " + ", ".join(f"{n} {truth}" for truth, n in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("truth", "whole", "stopped"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    truth = records_of(options.truth)
    whole, stopped = (ladders(truth, records_of(file))[0] for file in (options.whole, options.stopped))
    shared = {ladder.name for ladder in whole} & {ladder.name for ladder in stopped}
    parts = [[ladder for ladder in each if ladder.name in shared] for each in (whole, stopped)]
    print("\n".join(report(*parts)))


if __name__ == "__main__":
    main()
