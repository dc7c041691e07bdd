"""normscope's forecast over the ladder: the negative score, as a predictor."""

from benchmarks.predictors.setting import Cost, Prediction, Setting
from normscope.forecast import Forecast, LadderForecast, forecast_ladder

WORST = 3.0
"""Score of a failed rung without one; a rung that is undecided without a score is at 0, the limit."""

NAME = "normscope's forecast"


def of_normscope(setting: Setting) -> list[Prediction]:
    """Minus the forecast's score; the largest and the best rate that it names."""
    return [as_prediction(forecast_ladder(setting.subject, setting.anatomy, setting.recipe, setting.rates))]


def as_prediction(said: LadderForecast) -> Prediction:
    """The forecast of a ladder in the form of a predictor."""
    steps = sum(rung.curve[-1].step for rung in said.rungs if rung.curve)
    scores = tuple(_score(rung) for rung in said.rungs)
    best = None if said.best is None else said.best.rate
    return Prediction(NAME, scores, Cost(steps=steps), said.largest_rate, best)


def _score(rung: Forecast) -> float:
    if rung.score is None:
        return WORST if rung.failed else 0.0
    return -rung.score
