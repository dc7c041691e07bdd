"""Count how often the rates beside the limit hang on the seed or on rounding, though their trials are sure.

    python -m benchmarks.regimes.limit TRUTH FORECASTS

They are the largest learning rate that is said to train and the next one above it. `EITHER_WAY` in
`forecast/largest_rate.py` is set on the part that is seen. The second and third line are the sure cells of
all learning rates, without that share and with it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from benchmarks.process import records_of
from benchmarks.regimes.judged import forecast_of, judge
from benchmarks.regimes.scores import Cell, Record, figures, ladders
from normscope.forecast import largest_rate
from normscope.forecast.largest_rate import beside_limit


def judged_alone(forecasts: Sequence[Record]) -> list[Record]:
    """The records with the certainty of their own trials beside the limit."""
    with mock.patch.object(largest_rate, "EITHER_WAY", 0.0):
        return judge(forecasts)


def beside(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one ladder that are beside its limit."""
    rates = {rung.lr for rung in beside_limit([forecast_of(cell.forecast) for cell in cells])}
    return [cell for cell in cells if cell.forecast["lr"] in rates]


def table(truth: Sequence[Record], forecasts: Sequence[Record]) -> str:
    """The three lines, as text."""
    found, _ = ladders(truth, judged_alone(forecasts))
    sure = [cell for ladder in found for cell in beside(ladder.cells) if cell.is_sure]
    at_edge = sum(cell.truth == "edge" for cell in sure)
    lines = [
        f"beside the limit of {len(found)} ladders: {len(sure)} sure cells, {at_edge} of them at the edge"
    ]
    for words, records in (("without", judged_alone(forecasts)), ("with", judge(forecasts))):
        f = figures(ladders(truth, records)[0])
        right = f"{f['sure and right']} of {f['sure']} sure cells right"
        lines.append(
            f"{words} the share: {right}; {f['sure at the edge']} of {f['edge cells']} edge cells sure"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    options = parser.parse_args()
    print(table(records_of(options.truth), records_of(options.forecasts)))


if __name__ == "__main__":
    main()
