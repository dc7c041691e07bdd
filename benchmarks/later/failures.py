"""Definition of a late failure, from the losses of a run alone; fixed before any run was trained.

A curve is the means of 20 losses. Batches are not equally hard. As in `monitor/late_runs.py`, the deviation
of a reference run from its own median over 51 steps is therefore subtracted from each loss first; the
reference sees the same batches at a small learning rate. Runs on one batch, which is repeated, are left as
they are.

A run that takes part is *healthy at step 300*: its mean loss is then under the unigram entropy by 0.1 nats,
or under that of 100 steps before by 0.02, and not 0.3 above its lowest so far. It fails late by

- a **spike**, if a later mean is 0.3 nats above the lowest mean before it, or the loss is not finite;
- a **collapse**, if it does not come back: the mean of the last three is 0.3 above the lowest of all or not
  under the entropy, or the loss is not finite.

The first two ladders showed that this is noisy: the reference itself rises by 0.29 where hard batches follow
each other, and a run at the entropy falls by 0.02 by chance. A *strict* variant was therefore added before
any score was computed: the reference's deviation from its median over 300 steps is subtracted from the curve,
a run takes part only if it is under the entropy by 0.1 nats, and a spike or collapse is a rise by 0.5.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.process import EVERY, means

HEALTHY_AT = 300
MARGIN, FALL, FALL_STEPS = 0.1, 0.02, 100
RISE, STRICT_RISE = 0.3, 0.5
MEDIAN = 51
LAST = 3
"""Points of the curve whose mean is a run's end."""


@dataclass(frozen=True)
class Failure:
    """Late failure of a run.

    Attributes:
        step: last step before the first point of the curve that shows it.
        lasts: whether it is a collapse, else a spike that the run recovers from.
    """

    step: int
    lasts: bool


def hardness(reference: Sequence[float]) -> np.ndarray:
    """Nats by which each batch is harder than usual, from the losses of a healthy run."""
    padded = np.pad(np.asarray(reference), MEDIAN // 2, mode="reflect")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, MEDIAN), axis=1)
    found: np.ndarray = np.asarray(reference) - medians
    return found


def curve_of(losses: Sequence[float], harder: np.ndarray | None = None) -> list[float]:
    """Means of 20 losses, less the batches' `hardness`; one that is not finite stands for all that follow."""
    steady = np.asarray(losses) if harder is None else np.asarray(losses) - harder[: len(losses)]
    finite = list(itertools.takewhile(math.isfinite, means(steady.tolist())))
    return finite if np.isfinite(steady).all() else [*finite, math.inf]


def steadier(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    """A curve less the deviation of its ladder's reference from its median over 300 steps."""
    size = HEALTHY_AT // EVERY
    padded = np.pad(np.asarray(reference), size // 2, mode="reflect")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, size), axis=1)
    shared = min(len(curve), len(reference))
    harder = np.pad(np.asarray(reference) - usual, (0, max(0, len(curve) - shared)))[: len(curve)]
    return [float(value) for value in np.asarray(curve) - harder]


def is_healthy(curve: Sequence[float], entropy: float, *, strict: bool = False) -> bool:
    """Whether a run takes part, see the head of this file."""
    now = HEALTHY_AT // EVERY
    if len(curve) < now or not all(map(math.isfinite, curve[:now])):
        return False
    loss, earlier = curve[now - 1], curve[now - 1 - FALL_STEPS // EVERY]
    learns = loss <= entropy - MARGIN or (not strict and loss <= earlier - FALL)
    return learns and loss < min(curve[:now]) + RISE


def failure_of(curve: Sequence[float], entropy: float, *, strict: bool = False) -> Failure | None:
    """The late failure of a run that is healthy at step 300, None without one."""
    rise = STRICT_RISE if strict else RISE
    is_finite = math.isfinite(curve[-1])
    end = float(np.mean(curve[-LAST:]))
    lasts = not is_finite or bool(end >= min(curve) + rise or end >= entropy)
    for point in range(HEALTHY_AT // EVERY, len(curve)):
        if curve[point] >= min(curve[:point]) + rise:
            return Failure(point * EVERY, lasts)
    return Failure((len(curve) - LAST) * EVERY, lasts) if lasts else None
