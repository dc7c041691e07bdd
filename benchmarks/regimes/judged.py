"""Stored forecasts of the regimes, judged again by the rule as it is now.

The measurements of a forecast do not depend on the rule. A record keeps all of them, so that a changed rule
is scored without training anything.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from normscope.forecast.ladder import compared, judged_again
from normscope.forecast.largest_rate import with_doubt
from normscope.forecast.record import Forecast, ForecastStep


def of_parts(records: Sequence[dict[str, Any]], parts: Sequence[str]) -> list[dict[str, Any]]:
    """The forecasts of ladders of these parts; of all without any."""
    return [record for record in records if not parts or record["part"] in parts]


_HIDDEN = {True: "mask", False: ""}
"""Value of `Forecast.hidden` for each value in older records."""
_STEPS = tuple(ForecastStep.__dataclass_fields__)


def forecast_of(record: dict[str, Any]) -> Forecast:
    """The forecast that a record keeps."""
    steps = [{key: step[key] for key in _STEPS if key in step} for step in record["curve"]]
    for step in steps:
        step["loss"] = float("nan") if step["loss"] is None else step["loss"]
    names = ("outcome", "reason", "optimizer", "lr", "warmup", "steps", "unigram_entropy", "score")
    return Forecast(
        **{name: record[name] for name in names},
        curve=tuple(ForecastStep(**step) for step in steps),
        best_constant=record.get("best_constant"),
        tokens=record.get("tokens", True),
        certainty=record.get("certainty"),
        hidden=_HIDDEN.get(hidden := record.get("hidden", ""), hidden),
        divergence=record.get("divergence"),
        loss_unit=record.get("loss_unit", 1.0),
    )


def judge(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with the outcome, reason, score and certainty that the rule gives now.

    A rung that larger rates decided without a trial keeps its own, because there is nothing to judge again.
    """
    ladders: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        ladders[record["case"]].append(record)
    return [changed for ladder in ladders.values() for changed in _ladder(ladder)]


def _ladder(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rungs = [judged_again(rung) if rung.curve else rung for rung in map(forecast_of, records)]
    rungs = with_doubt([compared(rung, rungs) for rung in rungs])
    return [record | new for record, new in zip(records, map(_said, rungs), strict=True)]


def _said(rung: Forecast) -> dict[str, Any]:
    found = rung.to_dict()
    return {key: found[key] for key in ("outcome", "reason", "score", "certainty")}
