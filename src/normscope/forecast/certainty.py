"""Probability that a run trains, from the margins of its forecast.

A logistic model of the score and of the margin of life. In a trial as long as the run, it is one of the loss
at the end alone. docs/forecast-evidence.md has the calibration on runs that neither was fitted on.
"""

import math
from collections.abc import Sequence

from normscope.forecast.margins import life
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision
from normscope.forecast.thresholds import WORST

WEIGHTS = (-0.75, 2.11, 0.67)
"""Log-odds: intercept, weight of the score, weight of life. `python -m benchmarks.regimes.certainty` fitted
them on 270 cells of 30 ladders that are not held out: tokens 10, images 6, pairs 5, series 5, bytes 4."""
SPREAD = 0.04
"""Units of the loss at the end that a run with another seed or another rounding differs by: log-odds are the
score over it. Likeliest on the 342 cells of the ladders that are set on, of 0.02 to 0.1."""
MOST = 0.99
"""Largest certainty of a whole run, and 1 minus the smallest: another seed can always do something else."""
UNSHOWN = 0.8
"""Largest certainty of a trial that must show by its loss that it trains, and does not: less than is sure.
It was chosen, not fitted."""
ALIVE = 2.0
"""Margin of life beyond which more of it adds nothing."""


def certainty(decision: Decision, curve: Sequence[ForecastStep]) -> float | None:
    """Probability from 0 to 1 that the run trains; None if the forecast leaves it open.

    Args:
        decision: the decision from the measurements of `curve`.
    """
    if decision.outcome in ("undecided", "not measured") or decision.score is None:
        return None
    if decision.is_whole:
        return round(min(MOST, max(1 - MOST, 1 / (1 + math.exp(-decision.score / SPREAD)))), 3)
    seen = features(decision.score, curve)
    odds = sum(weight * feature for weight, feature in zip(WEIGHTS, seen, strict=True))
    found = 1 / (1 + math.exp(-odds))
    return round(found if decision.is_shown else min(UNSHOWN, found), 3)


def features(score: float, curve: Sequence[ForecastStep]) -> tuple[float, float, float]:
    """1, the score, and the margin of life (0 where no stack was read), within their limits."""
    alive = life(curve) if curve and curve[-1].diversity else 0.0
    return 1.0, min(-WORST, max(WORST, score)), min(ALIVE, max(-ALIVE, alive))
