"""Figures of a whole spectrum in one number, and bounds of a map by those of its parts.

None of them costs a product. Sources: Weyl 1912 (sums); Horn 1950 (products); Roy & Vetterli 2007 (effective
rank); Rudelson & Vershynin 2007 (stable rank).
"""

from collections.abc import Sequence
from math import exp, fsum, inf, isnan, log, nan

import numpy as np


def weyl_lower_bound(branch_norm: float, stream_scale: float = 1.0) -> float:
    """|α| − ‖A‖ ≤ σ_min(α·I + A) (Weyl 1912): positive says that the block cannot lose a direction.

    Costs no product.

    Args:
        branch_norm: ‖A‖, the branch's σ_max.
        stream_scale: α.

    Example:
        >>> weyl_lower_bound(0.25)
        0.75
    """
    return abs(stream_scale) - branch_norm


def weyl_interval(singular_values: np.ndarray, change: float) -> tuple[np.ndarray, np.ndarray]:
    """Where every σ_i(A + B) lies: |σ_i(A + B) − σ_i(A)| ≤ ‖B‖, and never below zero (Weyl 1912).

    For round-off, a quantised weight, or a branch beside its stream. A σ_i below ‖B‖ is not told from zero.

    Costs no product.

    Args:
        singular_values: of A (k,), in any order.
        change: ‖B‖, the largest singular value of what is added; its Frobenius norm will do.

    Returns:
        The lower and the upper ends (k,), descending.

    Example:
        >>> weyl_interval(np.array([3.0, 1.0, 0.5]), 0.5)
        (array([2.5, 0.5, 0. ]), array([3.5, 1.5, 1. ]))
    """
    if not change >= 0:
        raise ValueError(f"change={change}: expected a norm, which is not negative")
    values = _descending(singular_values)
    return np.maximum(values - change, 0.0), values + change


def condition_number(singular_values: np.ndarray, *, rank: int | None = None) -> float:
    """κ = σ₁/σ_r of singular values (k,), in any order; r the rank where it is given, else all.

    inf where σ_r is zero; nan for a map that is zero. Costs no product.

    Args:
        singular_values: (k,), in any order.
        rank: r; default k.

    Example:
        >>> condition_number(np.array([8.0, 4.0, 1e-17]), rank=2)
        2.0
    """
    values = _descending(singular_values)
    r = len(values) if rank is None else rank
    if not 1 <= r <= len(values):
        raise ValueError(f"rank={rank} of {len(values)} singular values: expected 1 to {len(values)}")
    if values[0] == 0:
        return nan
    return inf if values[r - 1] == 0 else float(values[0] / values[r - 1])


def effective_rank(singular_values: np.ndarray) -> float:
    """exp(−Σ p ln p) with p = σ/Σσ (Roy & Vetterli 2007): from 1, one direction, to the rank, all alike.

    0 for a map that is zero. Costs no product. Takes singular values (k,), in any order.

    Example:
        >>> round(effective_rank(np.array([2.0, 2.0, 0.0])), 12)
        2.0
    """
    values = _descending(singular_values)
    if values[0] == 0:
        return 0.0
    shares = values / values[0]
    shares = shares[shares > 0] / shares.sum()
    return exp(-fsum(float(p) * log(p) for p in shares if p > 0))


def stable_rank(singular_values: np.ndarray) -> float:
    """‖J‖_F² / ‖J‖² = Σσ²/σ₁² (Rudelson & Vershynin 2007): from 1 to the rank, blind to small values.

    0 for a map that is zero. Costs no product. Takes singular values (k,), in any order.

    Example:
        >>> stable_rank(np.array([2.0, 2.0, 0.0]))
        2.0
    """
    values = _descending(singular_values)
    return 0.0 if values[0] == 0 else float(((values / values[0]) ** 2).sum())


def product_log_upper_bound(largest: Sequence[float]) -> float:
    """ln of the bound σ_max(J_L … J_1) ≤ Π σ_max(J_l) (Horn 1950): the sum of logs, which does not overflow.

    Costs no product. Takes σ_max (L,) of the factors; −inf where one is zero.

    Example:
        >>> round(product_log_upper_bound([2.0, 3.0]), 6) == round(log(6), 6)
        True
    """
    return _sum_of_logs(largest)


def product_log_lower_bound(smallest: Sequence[float]) -> float:
    """ln of the bound σ_min(J_L … J_1) ≥ Π σ_min(J_l) (Horn 1950), for factors square or tall.

    A wide factor has a kernel: its σ_min is 0 here, whatever the least of its min(m, n) singular values. The
    least *non-zero* value of a product has no bound of this kind: what one factor lets through may lie near
    the kernel of the next. Costs no product. Takes σ_min (L,); −inf where one is zero.

    Example:
        >>> product_log_lower_bound([0.5, 2.0])
        0.0
    """
    return _sum_of_logs(smallest)


def product_log_volume_bounds(log_values: np.ndarray) -> np.ndarray:
    """Σ_{i≤k} ln σ_i(J_L ⋯ J_1) ≤ Σ_l Σ_{i≤k} ln σ_i(J_l) for every k, with equality at k = d (Horn 1950).

    What a product gains in its largest values it pays with the smallest: the sum of all is fixed. Tighter
    than k times `product_log_upper_bound`.

    Costs no product.

    Args:
        log_values: ln σ of L square factors (L, d), in any order within a factor; −inf for zeros.

    Returns:
        The bounds (d,), for k = 1 … d; the last one is ln |det J|.

    Example:
        >>> product_log_volume_bounds(np.log([[4.0, 1.0], [2.0, 0.5]])).round(4)  # ln 8, ln 4
        array([2.0794, 1.3863])
    """
    values = np.asarray(log_values, dtype=float)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"log values of shape {values.shape}: expected (L, d), neither of them 0")
    if np.isnan(values).any() or (values == inf).any():
        raise ValueError("log values that are nan or +inf: expected logs of singular values")
    return np.cumsum(np.sort(values, axis=1)[:, ::-1].sum(0))


def _sum_of_logs(values: Sequence[float]) -> float:
    if not len(values):
        raise ValueError("no factors: expected the singular value of at least one")
    if any(isnan(value) or value < 0 for value in values):
        raise ValueError(f"{list(values)}: expected singular values, which are not negative")
    return -inf if min(values) == 0 else fsum(log(value) for value in values)


def _descending(singular_values: np.ndarray) -> np.ndarray:
    values = np.sort(np.asarray(singular_values, dtype=float).reshape(-1))[::-1]
    if not len(values):
        raise ValueError("no singular values: expected at least one")
    if not np.isfinite(values).all() or values[-1] < 0:
        raise ValueError("singular values that are negative or not finite")
    return values
