"""Rows of `normscope bench forecast`: AUROC of the forecast and of the published predictors.

On two questions: whether a run trains, on ladders of text, and whether it diverges, on the grid of
`divergence`, which is the criterion of RKSP (arXiv:2602.22988).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.predictors.catalogue import CHEAP
from benchmarks.predictors.cells import Ladder, read
from benchmarks.predictors.of_normscope import NAME, RISE, as_predictions, forecast_of
from benchmarks.predictors.range_test import range_test
from benchmarks.predictors.scoring import Line, line
from benchmarks.predictors.setting import NotMeasuredError, Prediction, Predictor
from benchmarks.process import Row, row
from normscope.forecast import LadderForecast

BESIDE: tuple[Predictor, ...] = (*CHEAP, range_test)
"""Predictors that cost at most one run of 100 steps a ladder."""


DIVERGENCE = Path(__file__).with_name("divergence_truth.jsonl")
"""The runs of the grid of `divergence`."""


def divergence_rows() -> list[Row]:
    """`auroc_rows` of divergence, on the ladders of `DIVERGENCE`, which are forecast now."""
    forecasts = [(ladder, forecast_of(ladder.make())) for ladder in read(DIVERGENCE)]
    return auroc_rows(forecasts, "divergence, with norms and without")


def auroc_rows(forecasts: Sequence[tuple[Ladder, LadderForecast]], failure: str = "failures") -> list[Row]:
    """One row for each prediction of the forecast and of `BESIDE`, on the same ladders.

    Args:
        failure: name of what is predicted.
    """
    pairs: dict[str, list[tuple[Ladder, Prediction]]] = defaultdict(list)
    missing: dict[str, list[str]] = defaultdict(list)
    for ladder, said in forecasts:
        for prediction in as_predictions(said):
            pairs[prediction.name].append((ladder, prediction))
        setting = ladder.make()
        for predictor in BESIDE:
            try:
                found = predictor(setting)
            except NotMeasuredError as reason:
                missing[predictor.__name__].append(f"{ladder.name}: {reason}")
                continue
            for prediction in found:
                pairs[prediction.name].append((ladder, prediction))
    lines = [line(name, measured) for name, measured in pairs.items()]
    others = [each.auroc for each in lines if each.name not in (NAME, RISE) and not math.isnan(each.auroc)]
    target = f"≥ {max(others, default=math.nan):.3f}, the best of the others"
    gaps = [
        row(f"AUROC of {name}", "not measured", "", f"on {len(why)} ladders; {why[0]}")
        for name, why in missing.items()
    ]
    return [_row(each, failure, target if each.name == NAME else "") for each in lines] + gaps


def _row(each: Line, failure: str, target: str) -> Row:
    how = f"95 % interval {each.low:.2f} to {each.high:.2f} over {each.ladders} ladders, {each.cells} cells"
    how += f"; {each.too_large:.3f} without slow runs"
    if not math.isnan(each.largest):
        how += f"; largest rate within ×2 in {100 * each.largest:.0f} %"
    return row(f"AUROC of {failure}: {each.name}", f"{each.auroc:.3f}", target, how)
