"""The largest learning rate that trains: which rung decides it, where the trials leave that in doubt."""

from collections.abc import Collection, Sequence

from normscope.forecast.record import Forecast

MOST_AGAIN = 4
"""Most rungs around the largest rate that are tried again in a longer trial."""


def largest_rate(rungs: Sequence[Forecast]) -> float | None:
    """The largest learning rate that is predicted to train; None where none is."""
    return max((rung.lr for rung in rungs if rung.trains), default=None)


def in_doubt(rungs: Sequence[Forecast], tried: Collection[float]) -> Forecast | None:
    """The rung that decides the largest rate that trains and is not sure; None if none is left.

    It is the largest that trains, or the next above it. Where none trains, it is the likeliest to train of
    those that are not merely slow.

    Args:
        rungs: forecasts of one model, ascending in the learning rate.
        tried: rates that had a longer trial, or could not have one; they are not in doubt any more.
    """
    trained = [k for k, rung in enumerate(rungs) if rung.trains]
    known = [k for k, rung in enumerate(rungs) if rung.certainty is not None and rung.outcome != "slow"]
    if trained:
        deciding = [*trained[-1:], *range(trained[-1] + 1, len(rungs))[:1]]
    else:
        deciding = sorted(known, key=lambda k: rungs[k].certainty or 0.0)[-1:]
    return next((rungs[k] for k in deciding if not rungs[k].is_sure and rungs[k].lr not in tried), None)
