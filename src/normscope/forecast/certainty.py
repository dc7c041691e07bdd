"""Probability that a run trains, from the margins of its forecast.

A logistic model of the score and of the margin of life. docs/forecast.md has its calibration on runs that it
was not fitted on.
"""

import math
from collections.abc import Sequence

from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import WORST, Decision, life

WEIGHTS = (-0.75, 2.11, 0.67)
"""Log-odds: intercept, weight of the score, weight of life. `python -m benchmarks.regimes.certainty` fitted
them on 270 cells of 30 ladders that are not held out: tokens 10, images 6, pairs 5, series 5, bytes 4."""
ALIVE = 2.0
"""Margin of life beyond which more of it adds nothing."""


def certainty(decision: Decision, curve: Sequence[ForecastStep]) -> float | None:
    """Probability from 0 to 1 that the run trains; None if the forecast leaves it open.

    Args:
        decision: the decision from the measurements of `curve`.
    """
    if decision.outcome in ("undecided", "not measured") or decision.score is None:
        return None
    found = features(decision.score, curve)
    odds = sum(weight * feature for weight, feature in zip(WEIGHTS, found, strict=True))
    return round(1 / (1 + math.exp(-odds)), 3)


def features(score: float, curve: Sequence[ForecastStep]) -> tuple[float, float, float]:
    """1, the score, and the margin of life (0 where no stack was read), within their limits."""
    alive = life(curve) if curve and curve[-1].diversity else 0.0
    return 1.0, min(-WORST, max(WORST, score)), min(ALIVE, max(-ALIVE, alive))
