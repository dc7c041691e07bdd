"""Summaries of a spectrum in one number, and bounds of a map from bounds of its parts.

An iterative σ_max is an estimate from below. A product of such estimates is no upper bound of a product of
maps, and |α| minus one is no lower bound of a sum. So each bound here also takes the estimates' relative
errors. It holds with the probability that all estimates hold (`joint_confidence`). None costs a product.

Sources: Weyl 1912 (sums); Horn 1950 (products); Roy & Vetterli 2007 (effective rank); Rudelson & Vershynin
2007 (stable rank); Bonferroni 1936 (`joint_confidence`).
"""

from collections.abc import Sequence
from math import exp, fsum, inf, isnan, log, nan

import numpy as np


def joint_confidence(confidences: Sequence[float]) -> float:
    """1 − Σ(1 − c), at least 0: the least probability that several statements all hold, however dependent.

    Costs no product.

    Args:
        confidences: c (k,) of each statement; 1 for an exact one.

    Examples:
        >>> round(joint_confidence([0.99, 0.98, 1.0]), 6)
        0.97
    """
    if any(not 0 <= each <= 1 for each in confidences):
        raise ValueError(f"{list(confidences)}: expected probabilities between 0 and 1")
    return max(0.0, 1 - fsum(1 - each for each in confidences))


def confidence_of_each(together: float, count: int) -> float:
    """1 − (1 − c)/k: the confidence of each of k estimates with which all hold at confidence c.

    Costs no product.

    Args:
        together: c, the confidence of the bound.
        count: k, at least 1.

    Examples:
        >>> round(confidence_of_each(0.95, 10), 6)
        0.995
    """
    if not 0 < together < 1 or count < 1:
        raise ValueError(
            f"together={together}, count={count}: expected a probability and at least one estimate"
        )
    return 1 - (1 - together) / count


def weyl_lower_bound(branch_norm: float, stream_scale: float = 1.0, *, error: float = 0.0) -> float:
    """|α| − ‖A‖ ≤ σ_min(α·I + A) (Weyl 1912): a positive bound shows that the block loses no direction.

    Costs no product.

    Args:
        branch_norm: ‖A‖, the branch's σ_max.
        stream_scale: α.
        error: relative error of an iterative `branch_norm` (`SigmaMax.error`). The bound |α| − ‖A‖(1 + error)
            holds at the estimate's confidence; it is −inf for an infinite error.

    Examples:
        >>> weyl_lower_bound(0.25)
        0.75
        >>> weyl_lower_bound(0.25, error=0.5)
        0.625
    """
    _require_not_negative([branch_norm, error])
    return abs(stream_scale) - (branch_norm * (1 + error) if branch_norm else 0.0)


def weyl_interval(singular_values: np.ndarray, change: float) -> tuple[np.ndarray, np.ndarray]:
    """Interval of every σ_i(A + B): |σ_i(A + B) − σ_i(A)| ≤ ‖B‖, and never below zero (Weyl 1912).

    Useful for round-off, a quantised weight, or a branch beside its stream. Costs no product.

    Args:
        singular_values: of A (k,), in any order.
        change: ‖B‖, the largest singular value of the added B, or its Frobenius norm.

    Returns:
        The lower and the upper ends (k,), descending.

    Examples:
        >>> weyl_interval(np.array([3.0, 1.0, 0.5]), 0.5)
        (array([2.5, 0.5, 0. ]), array([3.5, 1.5, 1. ]))
    """
    if not change >= 0:
        raise ValueError(f"change={change}: expected a norm, which is not negative")
    values = _descending(singular_values)
    return np.maximum(values - change, 0.0), values + change


def condition_number(singular_values: np.ndarray, *, rank: int | None = None) -> float:
    """κ = σ₁/σ_r; inf where σ_r is zero, nan for a map that is zero. Costs no product.

    Args:
        singular_values: (k,), in any order.
        rank: r; default k.

    Examples:
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
    """exp(−Σ p ln p), p = σ/Σσ (Roy & Vetterli 2007): from 1, one direction, to the rank; 0 for a zero map.

    Costs no product. Takes singular values (k,), in any order.

    Examples:
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
    """‖J‖_F²/‖J‖² = Σσ²/σ₁² (Rudelson & Vershynin 2007): from 1 to the rank; 0 for a zero map.

    Costs no product. Takes singular values (k,), in any order.

    Examples:
        >>> stable_rank(np.array([2.0, 2.0, 0.0]))
        2.0
    """
    values = _descending(singular_values)
    return 0.0 if values[0] == 0 else float(((values / values[0]) ** 2).sum())


def product_log_upper_bound(largest: Sequence[float], *, errors: Sequence[float] | None = None) -> float:
    """ln of the bound σ_max(J_L … J_1) ≤ Π σ_max(J_l) (Horn 1950): a sum of logs, which does not overflow.

    Costs no product. For iterative estimates the bound is Π σ_max(1 + error), at their `joint_confidence`.

    Args:
        largest: σ_max (L,) of the factors; the result is −inf where one is zero.
        errors: relative errors (L,) of iterative estimates (`SigmaMax.error`); None where all are exact.

    Examples:
        >>> round(product_log_upper_bound([2.0, 3.0], errors=[0.5, 0.0]), 6) == round(log(9), 6)
        True
    """
    given = _errors(largest, errors)
    return _sum_of_logs([value * (1 + error) if value else 0.0 for value, error in given])


def product_log_lower_bound(smallest: Sequence[float], *, errors: Sequence[float] | None = None) -> float:
    """ln of the bound σ_min(J_L … J_1) ≥ Π σ_min(J_l) (Horn 1950), for factors square or tall.

    A wide factor has a kernel, so its σ_min counts as 0. The least *non-zero* value of a product has no such
    bound: the output of one factor may lie near the kernel of the next. Costs no product. For iterative
    estimates, which are from above, the bound is Π σ_min(1 − error), at their `joint_confidence`.

    Args:
        smallest: σ_min (L,) of the factors; the result is −inf where one is zero.
        errors: relative errors (L,) of iterative estimates (`SigmaMin.error`); None where all are exact.

    Examples:
        >>> product_log_lower_bound([0.5, 2.0])
        0.0
    """
    return _sum_of_logs([value * max(0.0, 1 - error) for value, error in _errors(smallest, errors)])


def _errors(values: Sequence[float], errors: Sequence[float] | None) -> list[tuple[float, float]]:
    errors = [0.0] * len(values) if errors is None else errors
    if len(errors) != len(values):
        raise ValueError(f"{len(errors)} errors for {len(values)} singular values: expected one each")
    _require_not_negative([*values, *errors])
    return list(zip(values, errors, strict=True))


def _sum_of_logs(values: Sequence[float]) -> float:
    if not len(values):
        raise ValueError("no factors: expected the singular value of at least one")
    return -inf if min(values) == 0 else fsum(log(value) for value in values)


def _require_not_negative(values: Sequence[float]) -> None:
    if any(isnan(value) or value < 0 for value in values):
        raise ValueError(f"{list(values)}: expected singular values and errors, which are not negative")


def _descending(singular_values: np.ndarray) -> np.ndarray:
    values = np.sort(np.asarray(singular_values, dtype=float).reshape(-1))[::-1]
    if not len(values):
        raise ValueError("no singular values: expected at least one")
    if not np.isfinite(values).all() or values[-1] < 0:
        raise ValueError("singular values that are negative or not finite")
    return values
