"""Best rates that longer trials of a few rates would name, by the number of rates.

    python -m benchmarks.regimes.candidates TRUTH FORECASTS

FORECASTS are short ones (`regimes.forecasts` without `--refine`). The rates that are tried again are those
that `forecast.best_rate.candidates` takes from them. In place of their longer trials stand the first 140
steps of the trained runs (replica 0, means over 20 steps), of rates that train in some replica. A rate that
is named is right as in `best_rates`.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.process import EVERY, records_of
from benchmarks.regimes.horizons import is_near
from benchmarks.regimes.judged import forecast_of, judge
from benchmarks.regimes.scores import Scored, ladders
from normscope.forecast import REFINED_STEPS, Forecast
from normscope.forecast.best_rate import KEPT

NUMBERS = (1, 2, 3, 4, 5, 9)
_MODULE: Any = importlib.import_module("normscope.forecast.best_rate")


def is_right(ladder: Scored, number: int, *, stopped: bool) -> bool:
    """Whether the rate that is named is near the best.

    Args:
        number: of rates that are tried again.
        stopped: whether trials that stopped half-way may be among them.
    """
    rungs = [forecast_of(cell.forecast) for cell in ladder.cells]
    with mock.patch.object(_MODULE, "CANDIDATES", number):
        chosen: Sequence[Forecast] = _MODULE.candidates(rungs)
    again = {rung.lr for rung in chosen if stopped or not rung.is_half}
    runs = {cell.forecast["lr"]: cell.runs for cell in ladder.cells}
    return is_near(runs, REFINED_STEPS // EVERY, KEPT, again)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    options = parser.parse_args()
    found, _ = ladders(records_of(options.truth), judge(records_of(options.forecasts)))
    counted = [ladder for ladder in found if any(cell.truth == "trained" for cell in ladder.cells)]
    for number in NUMBERS:
        right, without = (sum(is_right(x, number, stopped=way) for x in counted) for way in (True, False))
        print(f"{number} rates: {right} of {len(counted)}, {without} without those that stopped half-way")


if __name__ == "__main__":
    main()
