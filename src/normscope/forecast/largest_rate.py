"""The largest learning rate that trains: which rung decides it, where the trials leave that in doubt."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from normscope.forecast.best_rate import end_loss
from normscope.forecast.margins import mean_shows_it
from normscope.forecast.record import Forecast
from normscope.train import CRITERION_STEPS

MOST_AGAIN = 4
"""Most rungs around the largest rate that are tried again, over a whole run."""
EITHER_WAY = 0.25
"""Share of the sure rungs beside the limit that hang on the seed or on rounding. `benchmarks.regimes.limit`
counts 9 of 29 on the ladders that are set on, and 16 of 75 on others."""


def largest_rate(rungs: Sequence[Forecast]) -> float | None:
    """The largest learning rate that is predicted to train; None where none is."""
    return max((rung.lr for rung in rungs if rung.trains), default=None)


def in_doubt(rungs: Sequence[Forecast], tried: Collection[float]) -> Forecast | None:
    """The rung that decides the largest rate that trains and is open; None if none is left.

    It is open if it is not sure, or if it is said to train and its loss does not show it: at a rate that is
    too large, tokens may differ while the loss stands at that without the input.

    It is the largest that trains, or the next above it; then those that a larger one contradicts. If none
    trains, it is the likeliest to train of those that are not merely slow. Without a loss to beat, nothing
    can decide it.

    Args:
        rungs: forecasts of one model, ascending in the learning rate.
        tried: rates that had a whole run, or could not have one; they are not in doubt any more.
    """
    trained = [k for k, rung in enumerate(rungs) if rung.trains]
    if any(rung.baseline.loss is None for rung in rungs):
        return None
    if trained:
        deciding = [rungs[k] for k in range(trained[-1], len(rungs))[:2]]
    else:
        deciding = sorted((rung for rung in rungs if _may_train(rung)), key=_likelihood)[-1:]
    open_ = [rung for rung in deciding if not rung.is_sure or _is_unshown(rung)] + contradicted(rungs)[::-1]
    return next((rung for rung in open_ if rung.lr not in tried), None)


def contradicted(rungs: Sequence[Forecast]) -> list[Forecast]:
    """The rungs that fail by a short trial though a larger learning rate trains, and a smaller one too.

    One of them is wrong. The same holds without a smaller one for a rung that is sure to fail: merely small
    rates are slow. It was seen with dropout of 0.3, which makes batches agree less.

    Args:
        rungs: ascending in the learning rate.
    """
    trained = [rung.lr for rung in rungs if rung.trains]
    return [
        rung
        for rung in rungs
        if trained
        and rung.lr < trained[-1]
        and rung.failed
        and (rung.is_sure or trained[0] < rung.lr)
        and rung.steps < CRITERION_STEPS
    ]


def beside_limit(rungs: Sequence[Forecast]) -> list[Forecast]:
    """The largest rung that trains and the next above it; none if no rung trains, or none above it.

    Args:
        rungs: ascending in the learning rate.
    """
    above = [rung for rung in rungs if rung.lr > (largest_rate(rungs) or math.inf)]
    return [rung for rung in rungs if rung.lr == largest_rate(rungs)] + above[:1] if above else []


def with_doubt(rungs: Sequence[Forecast]) -> list[Forecast]:
    """The rungs, with a certainty that knows the others.

    Those that a larger one contradicts are as likely to train as not. Those beside the limit may go either
    way, whatever their own trials say; no trial of one seed can show that.

    Args:
        rungs: ascending in the learning rate.
    """
    wrong = {rung.lr for rung in contradicted(rungs)}
    near = {rung.lr for rung in beside_limit(rungs)}

    def known(rung: Forecast) -> float | None:
        if rung.lr in wrong:
            return 0.5
        if rung.lr in near and rung.certainty is not None:
            return round((1 - EITHER_WAY) * rung.certainty + EITHER_WAY / 2, 3)
        return rung.certainty

    return [dataclasses.replace(rung, certainty=known(rung)) for rung in rungs]


def _is_unshown(rung: Forecast) -> bool:
    """Whether a rung is said to train, and the mean loss of its trial does not show it."""
    return rung.trains and bool(rung.curve) and not mean_shows_it(rung.curve[-1], rung.baseline)


def _may_train(rung: Forecast) -> bool:
    """Whether a longer trial may show that a rung trains which is not said to."""
    return rung.outcome == "undecided" or (rung.certainty is not None and rung.outcome != "slow")


def _likelihood(rung: Forecast) -> tuple[float, float]:
    """Order of rungs by how likely they train: an open one is at 0.5, and among those the loss decides."""
    end = end_loss(rung)
    return 0.5 if rung.certainty is None else rung.certainty, -math.inf if end is None else -end
