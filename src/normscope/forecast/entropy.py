"""Entropy of a text from a small sample of its tokens.

The entropy of the frequencies in a sample is lower than that of the text, by 0.2 nats in 16,000 words. The
estimator corrects for the tokens that the sample has not met; which one, and how far it is off:
docs/forecast-rule.md, measured by `python -m benchmarks.entropy`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GROUPS = 16
"""Groups of sequences from which the error is estimated."""


@dataclass(frozen=True)
class Estimate:
    """Entropy in nats, and the error that it hardly exceeds (two standard deviations, and the bias)."""

    value: float
    error: float


def estimate(sequences: Sequence[np.ndarray]) -> Estimate:
    """Entropy of the text from which sequences of ids (N_i,) were drawn, with its error.

    The error has two parts. The scatter between sequences is found by leaving out each of `GROUPS` groups of
    them (jackknife). The remaining bias is under the change from a quarter of the sample to all of it.

    Raises:
        ValueError: there are fewer than `GROUPS` sequences, or an id is negative.
    """
    if len(sequences) < GROUPS:
        raise ValueError(f"{len(sequences)} sequences: expected {GROUPS} or more; give more batches")
    _, ids = np.unique(np.concatenate(sequences), return_inverse=True)
    groups = np.repeat(np.arange(len(sequences)) % GROUPS, [len(each) for each in sequences])
    counts = np.zeros((GROUPS, ids.max() + 1), dtype=np.int64)
    np.add.at(counts, (groups, ids), 1)
    return estimate_of_counts(counts)


def estimate_of_counts(counts: np.ndarray) -> Estimate:
    """The same from the counts (GROUPS, V) of each id in each group of sequences."""
    whole = counts.sum(0)
    value = chao_wang_jost(whole)
    without = np.array([chao_wang_jost(whole - part) for part in counts])
    scatter = math.sqrt((GROUPS - 1) * float(without.var()))
    quarters = [chao_wang_jost(counts[start::4].sum(0)) for start in range(4)]
    return Estimate(value, math.hypot(2 * scatter, value - float(np.mean(quarters))))


def chao_wang_jost(counts: np.ndarray) -> float:
    """Entropy in nats from the counts (V,) of each id in a sample.

    H = Σ c/n (ψ(n) − ψ(c)) + f₁/n Σ_{j≥1} (1−A)^j / (n−1+j), where f₁ and f₂ ids were met once and twice, and
    A estimates the mean frequency of those met once. Chao, Wang and Jost 2013, Methods in Ecology and
    Evolution 4:1091; the last sum is their difference of logarithms, without its cancellation.
    """
    from scipy.integrate import quad  # imported late: they are slow to import
    from scipy.special import digamma

    counts = counts[counts > 0].astype(np.float64)
    n, once, twice = counts.sum(), int((counts == 1).sum()), int((counts == 2).sum())
    met = float((counts / n * (digamma(n) - digamma(counts))).sum())
    if once == 0 or n == 1:
        return met
    unmet = 2 * twice / ((n - 1) * once + 2 * twice) if twice else 2 / ((n - 1) * (once - 1) + 2)
    if unmet >= 1:
        return met
    # Σ_{j≥1} x^j / (n−1+j) = ∫ e^{−u} x / (1 − x e^{−u/n}) du / n, with x = 1 − A
    tail, _ = quad(lambda u: math.exp(-u) / (unmet - (1 - unmet) * math.expm1(-u / n)), 0, math.inf)
    return met + once / n * (1 - unmet) * tail / n
