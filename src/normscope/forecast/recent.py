"""The recent loss of a trial: the mean of its last training losses."""

from collections.abc import Sequence

from normscope.forecast.thresholds import LONG
from normscope.subjects import Subject
from normscope.train import Recipe

RECENT = 10
"""Training losses whose mean is `recent_loss`; twice as many in a trial longer than `LONG` steps, whose rates
differ by less than batches do."""


def mean_recent(losses: Sequence[float], steps: int) -> float | None:
    """Mean of the last of `losses` in a trial of `steps` steps; None before the first."""
    recent = losses[-recent_steps(steps) :]
    return sum(recent) / len(recent) if recent else None


def recent_steps(steps: int) -> int:
    """Number of training losses in the mean `recent_loss` of a trial of `steps` steps."""
    return RECENT if steps <= LONG else 2 * RECENT


def mean_baseline(subject: Subject, config: Recipe, step: int) -> float | None:
    """Mean loss without the input on the batches of the mean loss after `step`, where known."""
    known, parts = subject.without_input, config.accumulation
    steps = range(max(0, step - recent_steps(config.steps)), step)
    return None if known is None else known.mean([range(each * parts, (each + 1) * parts) for each in steps])
