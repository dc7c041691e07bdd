"""Risk that a run diverges, from the training losses and gradients of its trial.

A run diverges if, within 300 steps, its loss is not finite, ends above the first loss or is ever above 50, or
the norm of all gradients is ever above 500: the criterion of arXiv:2602.22988 and ours together. This is not
the question whether a run trains: a run that stands still does neither.

A logistic model of four numbers that every trial has: the largest loss over the first, the largest norm of
the gradients, the learning rate (logarithms to base 10), and whether the model has no norm at all, because
such a model may diverge after a calm start. docs/forecast.md compares it with published predictors, on runs
that it was fitted on and on others.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from normscope.anatomy import Anatomy
from normscope.forecast.record import Forecast, ForecastStep

WEIGHTS = (-2.7, 0.9, 1.7, 1.6, 1.5)
"""Log-odds: intercept, and the weights of rise, gradient, learning rate and "no norm". `python -m
benchmarks.predictors.risk` fitted them on 60 cells of 15 ladders with AdamW, of text and of recall."""
RISE, GRADIENT = (0.0, 2.0), (-2.0, 4.0)
"""Limits of the logarithms: a hundredfold loss, and a gradient of 0.01 to 10⁴."""
OPTIMIZERS = ("adam", "adamw")
"""Optimisers whose learning rates the model knows: it was fitted with AdamW; a step of Adam has that size."""


def divergence_risk(
    optimizer: str, lr: float, curve: Sequence[ForecastStep], anatomy: Anatomy
) -> float | None:
    """Risk from 0 to 1.

    None for another optimiser than Adam or AdamW, before the first step, or where no block was read.
    """
    found = features(lr, curve, anatomy)
    if optimizer.lower() not in OPTIMIZERS or found is None:
        return None
    odds = sum(weight * feature for weight, feature in zip(WEIGHTS, found, strict=True))
    return round(1 / (1 + math.exp(-odds)), 4)


def features(lr: float, curve: Sequence[ForecastStep], anatomy: Anatomy) -> tuple[float, ...] | None:
    """1, the three logarithms within their limits, and 1 for a model without a norm; None if one is unknown.

    The first loss is that of the fixed batch before the first step.
    """
    last = curve[-1] if curve else None
    if last is None or last.largest_loss is None or last.largest_gradient is None or not anatomy.blocks:
        return None
    rise = _log(last.largest_loss / curve[0].loss, *RISE) if curve[0].loss > 0 else RISE[1]
    has_norm = bool(anatomy.final_norm) or any(branch.norms for branch in anatomy.branches)
    return 1.0, rise, _log(last.largest_gradient, *GRADIENT), math.log10(lr), float(not has_norm)


def at_least_that_of_smaller_rates(rungs: Sequence[Forecast]) -> list[Forecast]:
    """Rungs, ascending, none of them with a smaller risk than one at a smaller learning rate."""
    risks = itertools.accumulate((rung.divergence or 0.0 for rung in rungs), max)
    return [
        rung if rung.divergence is None else dataclasses.replace(rung, divergence=risk)
        for rung, risk in zip(rungs, risks, strict=True)
    ]


def _log(value: float, low: float, high: float) -> float:
    """log₁₀ within its limits; a value that is not finite is at the upper one."""
    if not math.isfinite(value):
        return high
    return min(high, max(low, math.log10(max(value, 1e-30))))
