"""Figures from few random probes and a truncated Krylov space, with both parts of their error.

Sampling: the jackknife over probes, times Student's t, and its estimate of the bias. Truncation: each figure
is taken after k/4, k/2 and k steps; where the changes shrink by a factor r a doubling, what is still to come
is about change · r/(1 − r) (Aitken). Where they do not shrink, nothing is known, and the error is inf: log σ
over many nats looks so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

Item = TypeVar("Item")

SETTLED = 1e-10
"""Changes below this, relative, say nothing any more."""

R_SAFETY, R_LEAST = 1.2, 0.25
"""The observed r is taken so many times larger, and at least this: two changes tell little."""

R_CURVE = 0.5
"""The least r of whole distributions: what lies between nodes shrinks no faster than 1/k."""


@dataclass(frozen=True)
class Estimate:
    """A figure of the whole map.

    Attributes:
        value: the figure.
        sampling: half-width of its interval at the stated confidence, from the spread between probes.
        truncation: what further Lanczos steps could still change; inf where that is not to be seen.
    """

    value: float
    sampling: float
    truncation: float

    @property
    def error(self) -> float:
        """Both together."""
        return self.sampling + self.truncation


def estimate(
    figure: Callable[[list[Item]], float], levels: list[list[Item]], confidence: float, round_off: float = 0.0
) -> Estimate:
    """`figure` of the pooled probes of the last level.

    Args:
        figure: of any number of probes together.
        levels: the probes at k/4, k/2 and k steps; the same list thrice where the runs were exact.
        confidence: of the sampling part.
        round_off: added to the truncation.
    """
    probes = levels[-1]
    without = [figure(probes[:i] + probes[i + 1 :]) for i in range(len(probes))]
    each = np.array([[figure([probe]) for probe in level] for level in levels])
    value = figure(probes)
    bias = abs(
        (len(probes) - 1) * (np.mean(without) - value)
    )  # of a figure that is not linear in the measure
    return Estimate(
        value,
        float(jackknife(np.array(without), confidence) + bias),
        float(truncation(each, round_off)) + round_off,
    )


def jackknife(without: NDArray[np.float64], confidence: float) -> NDArray[np.float64]:
    """Half-widths [...] from the figures without one probe each [p, ...]."""
    p = len(without)
    between = np.sqrt((p - 1) / p * ((without - without.mean(0)) ** 2).sum(0))
    return between * students_t(p, confidence)


def students_t(p: int, confidence: float) -> float:
    """Two-sided quantile of p observations."""
    return float(student.ppf((1 + confidence) / 2, p - 1))


def truncation(levels: NDArray[np.float64], noise: float = 0.0) -> NDArray[np.float64]:
    """What is still to come [...] from each probe's figures at k/4, k/2 and k [3, p, ...]."""
    noise = max(noise, SETTLED * float(np.abs(levels).max(initial=0.0)))
    return still_to_come(np.abs(np.diff(levels, axis=0)).mean(1), noise)


def still_to_come(
    changes: NDArray[np.float64], noise: float = SETTLED, least: float = R_LEAST
) -> NDArray[np.float64]:
    """The rest of two changes [2, ...] that shrink by a steady factor; inf where they do not shrink, unless
    the last is no more than `noise`. The factor is at least `least`."""
    before, last = changes
    r = np.maximum(least, R_SAFETY * last / np.maximum(before, np.finfo(float).tiny))
    rest = np.where(r < 1, last * r / np.maximum(1 - r, sqrt(np.finfo(float).eps)), np.inf)
    return np.where(last <= noise, last, rest)
