"""Whether a run trained: the one rule that maps, forecasts, remedies and `normscope train` are held to."""

import math
from collections.abc import Sequence

TRUTH_STEPS = 300
"""Steps of a run that is asked."""

LAST = 20
"""Losses whose mean is taken: one is noisy."""

MARGIN = 0.1
"""Nats under the unigram entropy: what ignores the context ends above."""

FALL, FALL_STEPS = 0.3, 60
"""Nats in so many steps: a loss that falls so fast has not come to its end."""


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


def outcome(losses: Sequence[float], unigram_entropy: float) -> str:
    """`trains` in words, for a run of any length: "trained", "not yet trained" or "did not train".

    A finite loss is "not yet" where fewer than `TRUTH_STEPS` were taken, or where it still falls by `FALL`.
    """
    if trains(losses, unigram_entropy):
        return "trained"
    loss = last_loss(losses)
    before = last_loss(losses[-LAST - FALL_STEPS : -FALL_STEPS])
    early = len(losses) < TRUTH_STEPS or before - loss > FALL
    return "not yet trained" if early and math.isfinite(loss) else "did not train"
