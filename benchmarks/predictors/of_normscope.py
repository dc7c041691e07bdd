"""normscope's forecast over the ladder as predictors of failure and of divergence, quick and refined."""

import math
from collections.abc import Sequence

from benchmarks.predictors.setting import BROKEN, Cost, Prediction, Setting
from normscope.forecast import Forecast, LadderForecast, forecast_ladder

WORST = 3.0
"""Score of a failed rung without one; a rung that is undecided without a score is at 0, the limit."""

NAME = "normscope's forecast"
RISK = "normscope's risk of divergence"
REFINED = "normscope's risk of divergence, refined"
REFINE = 140
"""Steps of the longer trials of a refined ladder."""
RISE = "normscope's trials, largest loss over the first"


def of_normscope(setting: Setting) -> list[Prediction]:
    """See `as_predictions`."""
    return as_predictions(forecast_of(setting))


def refined_normscope(setting: Setting) -> list[Prediction]:
    """The risk of a ladder with longer trials of its best rates and a range test, as `--forecast` has it."""
    return [refined_prediction(forecast_of(setting, REFINE))]


def refined_prediction(said: LadderForecast) -> Prediction:
    """The risk of a ladder with longer trials."""
    risks = [rung.divergence for rung in said.rungs]
    return Prediction(REFINED, _ranked(said.rungs, risks), _cost(said))


def forecast_of(setting: Setting, refine: int = 0) -> LadderForecast:
    """The forecast of a ladder; `refine` as in `forecast_ladder`."""
    return forecast_ladder(setting.subject, setting.anatomy, setting.recipe, setting.rates, refine=refine)


def _cost(said: LadderForecast) -> Cost:
    """Training steps of the measured trials, without those that longer ones replaced and a range test."""
    return Cost(steps=sum(rung.last_step for rung in said.rungs))


def as_predictions(said: LadderForecast) -> list[Prediction]:
    """Minus the forecast's score, with the rates that it names; its risk; and the largest loss of each trial.

    The score is that of a run that trains. It is the lowest both for a run that stands still and for one that
    diverges, and therefore does not rank divergence. The risk does. The largest loss is that of the measured
    steps, as it was compared before the forecast had a risk.
    """
    best = None if said.best is None else said.best.rate
    risks = [rung.divergence for rung in said.rungs]
    return [
        Prediction(NAME, tuple(map(_score, said.rungs)), _cost(said), said.largest_rate, best),
        Prediction(RISK, _ranked(said.rungs, risks), _cost(said)),
        Prediction(RISE, _ranked(said.rungs, list(map(_rise, said.rungs))), _cost(said)),
    ]


def _score(rung: Forecast) -> float:
    if rung.score is None:
        return WORST if rung.failed else 0.0
    return -rung.score


def _ranked(rungs: Sequence[Forecast], values: Sequence[float | None]) -> tuple[float, ...]:
    """The values of rungs, ascending. A rung that could not be measured has 1.

    A low rate that larger ones decide is not tried. It has the smallest value of the larger rates.
    """
    larger = [[value for value in values[k + 1 :] if value is not None] for k in range(len(rungs))]
    fills = [
        min(found) if rung.is_untried and found else 1.0 for rung, found in zip(rungs, larger, strict=True)
    ]
    return tuple(fill if value is None else value for value, fill in zip(values, fills, strict=True))


def _rise(rung: Forecast) -> float | None:
    """The largest measured loss after a step over that before the first; `BROKEN` if it is not finite.

    None if no step was measured.
    """
    if len(rung.curve) < 2:
        return None
    losses = [each for point in rung.curve[1:] for each in (point.loss, point.train_loss) if each is not None]
    if not all(map(math.isfinite, losses)):
        return BROKEN
    return min(BROKEN, max(losses) / rung.curve[0].loss)
