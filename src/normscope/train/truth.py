"""Whether a run trained: the one rule that maps, forecasts, remedies and `normscope train` are held to."""

import math
from collections.abc import Sequence

TRUTH_STEPS = 300
"""Steps of a run that is asked."""

LAST = 20
"""Losses whose mean is taken: one is noisy."""

MARGIN = 0.1
"""Nats under the unigram entropy: what ignores the context ends above."""


def last_loss(losses: Sequence[float]) -> float:
    """The mean of the last `LAST` losses, or of all where there are fewer; nan where there are none."""
    last = losses[-LAST:]
    return sum(last) / len(last) if last else math.nan


def trains(losses: Sequence[float], unigram_entropy: float) -> bool:
    """Whether the mean of the last `LAST` losses is finite and at least `MARGIN` under `unigram_entropy`.

    Args:
        losses: of each step of a run of `TRUTH_STEPS`, in nats.
        unigram_entropy: of the targets, in nats.
    """
    loss = last_loss(losses)
    return math.isfinite(loss) and loss <= unigram_entropy - MARGIN
