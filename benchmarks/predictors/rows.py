"""Rows of `normscope bench forecast`: AUROC of the forecast and of the published predictors."""

import math
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.predictors.catalogue import CHEAP
from benchmarks.predictors.cells import Ladder
from benchmarks.predictors.of_normscope import NAME, as_prediction
from benchmarks.predictors.range_test import range_test
from benchmarks.predictors.scoring import Line, line
from benchmarks.predictors.setting import NotMeasuredError, Prediction, Predictor
from benchmarks.process import Row, row
from normscope.forecast import LadderForecast

BESIDE: tuple[Predictor, ...] = (*CHEAP, range_test)
"""Predictors that cost at most one run of 100 steps a ladder."""


def auroc_rows(forecasts: Sequence[tuple[Ladder, LadderForecast]]) -> list[Row]:
    """One row for the forecast and for each of `BESIDE` and its variants, on the same ladders."""
    pairs: dict[str, list[tuple[Ladder, Prediction]]] = defaultdict(list)
    missing: dict[str, list[str]] = defaultdict(list)
    for ladder, said in forecasts:
        pairs[NAME].append((ladder, as_prediction(said)))
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
    best = max((each.auroc for each in lines[1:] if not math.isnan(each.auroc)), default=math.nan)
    gaps = [
        row(f"AUROC of {name}", "not measured", "", f"on {len(why)} ladders; {why[0]}")
        for name, why in missing.items()
    ]
    return [
        _row(each, f"≥ {best:.3f}, the best of the others" if i == 0 else "") for i, each in enumerate(lines)
    ] + gaps


def _row(each: Line, target: str) -> Row:
    how = f"95 % interval {each.low:.2f} to {each.high:.2f} over {each.ladders} ladders, {each.cells} cells"
    how += f"; {each.too_large:.3f} without slow runs"
    if not math.isnan(each.largest):
        how += f"; largest rate within ×2 in {100 * each.largest:.0f} %"
    return row(f"AUROC of failures: {each.name}", f"{each.auroc:.3f}", target, how)
