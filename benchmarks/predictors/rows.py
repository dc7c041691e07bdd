"""Rows of `normscope bench forecast`: AUROC of the forecast and of the published predictors.

On two questions: whether a run trains, on ladders of text, and whether it diverges, on the grid of
`divergence`, which is the criterion of RKSP (arXiv:2602.22988).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.predictors.catalogue import CHEAP
from benchmarks.predictors.cells import Ladder, read
from benchmarks.predictors.divergence import PARTS
from benchmarks.predictors.dyt_saturation import dyt_saturation
from benchmarks.predictors.of_normscope import (
    NAME,
    REFINE,
    REFINED,
    RISE,
    RISK,
    as_predictions,
    forecast_of,
    refined_prediction,
)
from benchmarks.predictors.range_test import range_test
from benchmarks.predictors.scoring import Line, line
from benchmarks.predictors.setting import NotMeasuredError, Prediction, Predictor
from benchmarks.process import Row, row
from normscope.forecast import LadderForecast

BESIDE: tuple[Predictor, ...] = (*CHEAP, range_test, dyt_saturation)
"""Published predictors and baselines; none costs more than the forecast."""


DIVERGENCE = Path(__file__).with_name("divergence_truth.jsonl")
"""The runs of the grid of `divergence`."""

QUESTIONS = {"start": "divergence, above the start", "paper": "divergence, as published"}
"""The criteria of divergence in words."""

OURS = (NAME, RISE, RISK, REFINED)
"""Predictions of normscope's own."""

Pairs = dict[str, list[tuple[Ladder, Prediction]]]
"""Ladders and their predictions, by predictor."""


def divergence_rows() -> list[Row]:
    """Rows of both criteria of divergence, for each part of the ladders of `DIVERGENCE`.

    Every ladder is forecast now, and refined too where it is held out.
    """
    ladders = read(DIVERGENCE)
    rows: list[Row] = []
    for part in PARTS:
        chosen = [each for each in ladders if each.part == part]
        if not chosen:
            continue
        pairs, missing = predicted([(each, forecast_of(each.make())) for each in chosen])
        if part != "set-on":
            pairs[REFINED] = [(each, refined_prediction(forecast_of(each.make(), REFINE))) for each in chosen]
        for criterion, question in QUESTIONS.items():
            judged = {each.name: each for each in read(DIVERGENCE, criterion)}
            again = {
                name: [(judged[ladder.name], prediction) for ladder, prediction in found]
                for name, found in pairs.items()
            }
            rows += _rows(again, f"{question}, {part} ladders", RISK, REFINED)
        rows += _gaps(missing, f"divergence, {part} ladders")
    return rows


def auroc_rows(forecasts: Sequence[tuple[Ladder, LadderForecast]], failure: str = "failures") -> list[Row]:
    """One row for each prediction of the forecast and of `BESIDE`, on the same ladders.

    Args:
        failure: name of what is predicted.
    """
    pairs, missing = predicted(forecasts)
    return _rows(pairs, failure, NAME) + _gaps(missing, failure)


def predicted(
    forecasts: Sequence[tuple[Ladder, LadderForecast]],
) -> tuple[Pairs, dict[str, list[str]]]:
    """Predictions of the forecasts and of `BESIDE` on the same ladders, and the reasons of missing ones."""
    pairs: Pairs = defaultdict(list)
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
    return pairs, missing


def _gaps(missing: Mapping[str, Sequence[str]], failure: str) -> list[Row]:
    """A row for each predictor that was not measured on some ladders."""
    return [
        row(f"AUROC of {failure}: {name}", "not measured", "", f"on {len(why)} ladders; {why[0]}")
        for name, why in missing.items()
    ]


def _rows(pairs: Pairs, failure: str, *ours: str) -> list[Row]:
    """A row for each predictor; the target of `ours` is the best of the others."""
    lines = [line(name, measured) for name, measured in pairs.items()]
    others = [each.auroc for each in lines if each.name not in OURS and not math.isnan(each.auroc)]
    target = f"≥ {max(others):.3f}, the best of the others" if others else ""
    return [_row(each, pairs[each.name], failure, target if each.name in ours else "") for each in lines]


def _row(each: Line, pairs: Sequence[tuple[Ladder, Prediction]], failure: str, target: str) -> Row:
    what, how = f"AUROC of {failure}: {each.name}", f"over {each.ladders} ladders, {each.cells} cells"
    if math.isnan(each.auroc):
        fails = [cell.fails for ladder, _ in pairs for cell in ladder.cells if cell.fails is not None]
        kinds = "all runs fail" if any(fails) else "no run fails"
        return row(what, f"not measured: {kinds if fails else 'all cells are edges'}", target, how)
    how = f"95 % interval {each.low:.2f} to {each.high:.2f} {how}"
    if not math.isnan(each.too_large):
        how += f"; {each.too_large:.3f} without slow runs"
    if not math.isnan(each.largest):
        how += f"; largest rate within ×2 in {100 * each.largest:.0f} %"
    return row(what, f"{each.auroc:.3f}", target, how)
