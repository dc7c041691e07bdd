"""The criterion for a trained run, for maps, forecasts, remedies and `normscope train`."""

import math
from collections.abc import Sequence

CRITERION_STEPS = 300
"""Steps after which the criterion is applied."""

LAST = 20
"""Number of last losses that are averaged, because a single one is noisy."""

MARGIN = 0.1
"""Nats by which the loss must be below the unigram entropy, the best loss of a model without context."""

FALL, FALL_STEPS = 0.3, 60
"""A loss that fell by `FALL` nats in the last `FALL_STEPS` steps is still falling."""


def last_loss(losses: Sequence[float]) -> float:
    """The mean of the last `LAST` losses, or of all if there are fewer; nan if there are none."""
    last = losses[-LAST:]
    return sum(last) / len(last) if last else math.nan


def trains(losses: Sequence[float], unigram_entropy: float) -> bool:
    """True if the mean of the last `LAST` losses is finite and at least `MARGIN` below `unigram_entropy`.

    Args:
        losses: losses of a run of `CRITERION_STEPS`, in nats.
        unigram_entropy: entropy of the targets, in nats.
    """
    loss = last_loss(losses)
    return math.isfinite(loss) and loss <= unigram_entropy - MARGIN


def outcome(losses: Sequence[float], unigram_entropy: float) -> str:
    """The outcome of a run of any length: "trained", "not yet trained" or "did not train".

    A run with a finite loss is "not yet trained" before `CRITERION_STEPS` steps, or if its loss still falls.
    """
    if trains(losses, unigram_entropy):
        return "trained"
    loss = last_loss(losses)
    before = last_loss(losses[-LAST - FALL_STEPS : -FALL_STEPS])
    early = len(losses) < CRITERION_STEPS or before - loss > FALL
    return "not yet trained" if early and math.isfinite(loss) else "did not train"
