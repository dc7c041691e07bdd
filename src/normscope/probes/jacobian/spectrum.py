"""A whole spectrum as rows: where the Jacobian is small enough to be taken whole."""

from math import inf

import numpy as np

from normscope.linalg import condition_number, effective_rank, numerical_rank, stable_rank
from normscope.probes.jacobian.workspace import log10
from normscope.probes.measurement import Measurement, not_measured

RANK_TOLERANCE = 1e-5  # singular values above this share of the largest count
PLAIN = 10.0  # a rank is plain where the least value that counts is so many times the next

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Shares of the singular values at which the distribution of log σ is given."""

BATCHED = 0.5
"""What a VJP among many at once costs of a forward, with its share of the SVD; measured at T·d = 512: 0.4."""

LARGEST_FEW = "jacobian/top-singular-values"
NUM_TOP = 20


def spectrum_rows(site: str, values: np.ndarray, null: int, how: str) -> list[Measurement]:
    """The figures of all singular values (k,), descending.

    "Non-zero" and κ are on the complement of the kernel: over the values that count for the rank.

    Args:
        null: dimension of the kernel that is known.
    """
    return [
        Measurement("jacobian/sigma-min", site, float(values[-1]), how=how),
        Measurement("jacobian/effective-rank", site, effective_rank(values), how=how),
        Measurement("jacobian/stable-rank", site, stable_rank(values), how=how),
        Measurement("jacobian/log-sigma", site, _quantiles(values), "log10", f"quantiles; {how}"),
        Measurement(LARGEST_FEW, site, tuple(map(float, values[:NUM_TOP])), how=how),
        *ranked_rows(site, values, null, how),
    ]


def ranked_rows(site: str, values: np.ndarray, null: int, how: str) -> list[Measurement]:
    """Rank, the least value that counts, and κ: where the kernel begins at a gap."""
    rank, gap, where = rank_of(values, null)
    quantities = tuple(f"jacobian/{name}" for name in ("rank", "sigma-min-nonzero", "condition"))
    if rank == 0:
        return [Measurement(quantities[0], site, 0.0, how=how)] + [
            not_measured(quantity, site, "the map is zero") for quantity in quantities[1:]
        ]
    if gap < PLAIN:
        reason = f"the values about {RANK_TOLERANCE:g} σ₁ are a continuum, none {PLAIN:g} times the next"
        return [not_measured(quantity, site, reason) for quantity in quantities]
    counted = f"{where}, gap {gap:.3g}; {how}"
    figures = (float(rank), float(values[rank - 1]), condition_number(values, rank=rank))
    return [
        Measurement(quantity, site, figure, how=counted)
        for quantity, figure in zip(quantities, figures, strict=True)
    ]


def rank_of(values: np.ndarray, null: int) -> tuple[int, float, str]:
    """Rank, gap and how: the known kernel's complement where a gap shows it, else what is above the
    tolerance."""
    known = len(values) - null
    if null and known > 0 and values[known - 1] > PLAIN * values[known]:
        gap = float(values[known - 1] / values[known]) if values[known] else inf
        return known, gap, f"less the {null} directions of a norm's kernel"
    return *numerical_rank(values, RANK_TOLERANCE), f"σ > {RANK_TOLERANCE:g} σ₁"


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    """log₁₀ σ at `QUANTILES`, −inf of zeros."""
    return tuple(log10(float(value)) for value in np.quantile(values, QUANTILES, method="lower"))
