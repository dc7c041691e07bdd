"""Exact arithmetic, over the fractions or modulo a prime: LayerNorm's Jacobian and the rank of a matrix.

Shapes: D width.
"""

from fractions import Fraction
from typing import Any

import numpy as np

Exact = np.ndarray[Any, np.dtype[np.object_]]
"""Python's integers, which do not overflow, or its fractions."""


def as_exact(values: Any, prime: int | None = None) -> Exact:
    """Every number as the fraction that it is, modulo `prime` where one is given."""
    exact = np.array(values, dtype=object)
    for place, value in np.ndenumerate(exact):
        above, below = value.as_integer_ratio()
        exact[place] = _reduced(above * _inverse(below, prime), prime)
    return exact


def scaled_norm_jacobian(z_D: Exact, prime: int | None = None) -> Exact:
    """σ J_LN(z) [D, D] = I − 11ᵀ/d − z̄z̄ᵀ/‖z̄‖², which has no root in it."""
    share = _inverse(len(z_D), prime)
    centred_D = _reduced(z_D - z_D.sum() * share, prime)
    over = _inverse(centred_D @ centred_D, prime)
    return _reduced(np.eye(len(z_D), dtype=object) - share - np.outer(centred_D, centred_D) * over, prime)


def exact_rank(matrix: Exact, prime: int | None = None) -> int:
    """The rank by Gauss's elimination; modulo a prime it is never above that over the fractions."""
    rows, rank = matrix.copy(), 0
    for column in range(len(rows)):
        pivot = next((i for i in range(rank, len(rows)) if rows[i, column]), None)
        if pivot is not None:
            rows[[rank, pivot]] = rows[[pivot, rank]]
            factors = rows[rank + 1 :, column] * _inverse(rows[rank, column], prime)
            rows[rank + 1 :] = _reduced(rows[rank + 1 :] - np.outer(factors, rows[rank]), prime)
            rank += 1
    return rank


def _inverse(value: Any, prime: int | None) -> Any:
    return pow(value, -1, prime) if prime else 1 / Fraction(value)


def _reduced(values: Any, prime: int | None) -> Any:
    return values % prime if prime else values
