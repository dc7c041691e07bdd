"""Risk that a run diverges, from the training losses and gradients of its trial.

A run diverges if, within 300 steps, its loss is not finite, ends above the first loss or is ever above 50, or
the norm of all gradients is ever above 500: the criterion of arXiv:2602.22988 and ours together. This is not
the question whether a run trains: a run that stands still does neither.

A logistic model of five numbers: the largest loss over the first, the largest norm of the gradients, the
learning rate (logarithms to base 10), whether the model has no norm at all, because such a model may diverge
after a calm start, and how near the rate is to one at which a trial blew up. For the last, a ladder looks at
all its trials. A refined ladder also has a range test, see `range_test`; the risk is then the mean, in
log-odds, of that of the five numbers and that of the distance to the rate at which the loss diverged there.
docs/predictors.md compares the risk with published predictors, on runs that it was fitted on and on others.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from normscope.anatomy import Anatomy
from normscope.forecast.record import Forecast, ForecastStep

WEIGHTS = (-2.0, 0.7, 1.2, 1.5, 1.7, 2.9)
"""Log-odds: intercept, and the weights of rise, gradient, learning rate, "no norm" and nearness. `python -m
benchmarks.predictors.risk` fitted them on 240 cells of 60 ladders with AdamW, of text and of recall."""
RISE, GRADIENT = (0.0, 2.0), (-2.0, 4.0)
"""Limits of the logarithms: a hundredfold loss, and a gradient of 0.01 to 10⁴."""
BLOWN_UP_RISE = 1.5
"""Logarithm of the largest loss over the first from which a trial blew up: 32 times the first loss."""
REACH = 1.0
"""Factors of ten in the learning rate over which a trial that blew up raises the risk of smaller rates."""
RANGE_TEST = (5.1, 4.2)
"""Log-odds from the range test `SHORT`: intercept, and weight of the logarithm of the learning rate over the
one at which the loss diverged. `benchmarks.predictors.risk` fitted them on 328 cells of 82 ladders."""
AWAY = (-3.0, 1.0)
"""Limits of that logarithm."""
OPTIMIZERS = ("adam", "adamw")
"""Optimisers whose learning rates the model knows: it was fitted with AdamW; a step of Adam has that size."""


def divergence_risk(
    optimizer: str,
    lr: float,
    curve: Sequence[ForecastStep],
    anatomy: Anatomy,
    blown_up: Iterable[float] = (),
    diverged: float | None = None,
) -> float | None:
    """Risk from 0 to 1.

    None for another optimiser than Adam or AdamW, before the first step, or where no block was read.

    Args:
        blown_up: learning rates at which other trials of the model blew up.
        diverged: learning rate at which the loss diverged in a range test; None without one.
    """
    found = features(lr, curve, anatomy, blown_up)
    if optimizer.lower() not in OPTIMIZERS or found is None:
        return None
    odds = sum(weight * feature for weight, feature in zip(WEIGHTS, found, strict=True))
    if diverged is not None:
        odds = (odds + RANGE_TEST[0] + RANGE_TEST[1] * distance(lr, diverged)) / 2
    return round(1 / (1 + math.exp(-odds)), 4)


def features(
    lr: float, curve: Sequence[ForecastStep], anatomy: Anatomy, blown_up: Iterable[float] = ()
) -> tuple[float, ...] | None:
    """1, the three logarithms within their limits, 1 for a model without a norm, and the nearness.

    The first loss is that of the fixed batch before the first step. The nearness is 1 at a rate at which the
    trial blew up, and falls to 0 at a tenth of it. None if one of them is unknown.
    """
    last = curve[-1] if curve else None
    rise = _rise(curve)
    if last is None or rise is None or last.largest_gradient is None or not anatomy.blocks:
        return None
    has_norm = bool(anatomy.final_norm) or any(branch.norms for branch in anatomy.branches)
    above = [math.log10(rate / lr) for rate in blown_up if rate > lr]
    near = 1.0 if rise >= BLOWN_UP_RISE else max(0.0, 1 - min(above, default=REACH) / REACH)
    gradient = _log(last.largest_gradient, *GRADIENT)
    return 1.0, rise, gradient, math.log10(lr), float(not has_norm), near


def distance(lr: float, diverged: float) -> float:
    """Logarithm to base 10 of `lr` over `diverged`, within its limits; it is larger nearer to divergence."""
    return _log(lr / diverged, *AWAY)


def with_neighbours(
    rungs: Sequence[Forecast], anatomy: Anatomy, diverged: float | None = None
) -> list[Forecast]:
    """Rungs, ascending, whose risks take all rates into account.

    A rate below one at which a trial blew up has a larger risk. No rate has less risk than a smaller one.

    Args:
        diverged: learning rate at which the loss diverged in a range test; None without one.
    """
    blown_up = rates_blown_up(rungs)
    risks = [
        divergence_risk(rung.optimizer, rung.lr, rung.curve, anatomy, blown_up, diverged) for rung in rungs
    ]
    highest = itertools.accumulate((risk or 0.0 for risk in risks), max)
    return [
        rung if risk is None else dataclasses.replace(rung, divergence=most)
        for rung, risk, most in zip(rungs, risks, highest, strict=True)
    ]


def rates_blown_up(rungs: Iterable[Forecast]) -> list[float]:
    """Learning rates at which the trial blew up."""
    return [rung.lr for rung in rungs if (_rise(rung.curve) or 0.0) >= BLOWN_UP_RISE]


def _rise(curve: Sequence[ForecastStep]) -> float | None:
    """Logarithm of the largest loss over the first, within its limits.

    None before the first step, and where finite losses start at no positive one.
    """
    largest = curve[-1].largest_loss if curve else None
    if largest is None:
        return None
    first = curve[0].loss
    if not math.isfinite(largest):
        return RISE[1]
    return _log(largest / first, *RISE) if math.isfinite(first) and first > 0 else None


def _log(value: float, low: float, high: float) -> float:
    """log₁₀ within its limits; a value that is not finite is at the upper one."""
    if not math.isfinite(value):
        return high
    return min(high, max(low, math.log10(max(value, 1e-30))))
