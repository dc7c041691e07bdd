"""A whole spectrum as rows: where the Jacobian is small enough to be taken whole."""

import numpy as np

from normscope.linalg import condition_number, effective_rank, numerical_rank, stable_rank
from normscope.probes.jacobian.look import log10
from normscope.probes.measurement import Measurement, not_measured

RANK_TOLERANCE = 1e-5
"""Singular values above this share of the largest count."""

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Shares of the singular values at which the distribution of log σ is given."""

LARGEST_FEW = "jacobian/top-singular-values"
NUM_TOP = 20


def spectrum_rows(site: str, values: np.ndarray, how: str) -> list[Measurement]:
    """The figures of all singular values (k,), descending.

    "Non-zero" and κ are on the complement of the kernel: over the values that count for the rank.
    """
    rank, gap = numerical_rank(values, RANK_TOLERANCE)
    counted = f"σ > {RANK_TOLERANCE:g} σ₁, gap {gap:.3g}; {how}"
    rows = [
        Measurement("jacobian/sigma-min", site, float(values[-1]), how=how),
        Measurement("jacobian/rank", site, float(rank), how=counted),
        Measurement("jacobian/effective-rank", site, effective_rank(values), how=how),
        Measurement("jacobian/stable-rank", site, stable_rank(values), how=how),
        Measurement("jacobian/log-sigma", site, _quantiles(values), "log10", f"quantiles; {how}"),
        Measurement(LARGEST_FEW, site, tuple(map(float, values[:NUM_TOP])), how=how),
    ]
    if rank == 0:
        reason = "the map is zero"
        return [
            *rows,
            *(not_measured(f"jacobian/{name}", site, reason) for name in ("sigma-min-nonzero", "condition")),
        ]
    return [
        *rows,
        Measurement("jacobian/sigma-min-nonzero", site, float(values[rank - 1]), how=counted),
        Measurement("jacobian/condition", site, condition_number(values, rank=rank), how=counted),
    ]


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    """log₁₀ σ at `QUANTILES`, −inf of zeros."""
    return tuple(log10(float(value)) for value in np.quantile(values, QUANTILES, method="lower"))
