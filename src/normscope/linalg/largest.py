"""σ_max and its vectors, by Golub–Kahan–Lanczos; `golub_kahan` explains the error bound.

Sources: Golub & Kahan 1965; Hochstenbach 2013, "Probabilistic upper bounds for the matrix two-norm".
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from normscope.linalg.golub_kahan import (
    CONFIDENCE,
    Bidiagonalisation,
    LinearMap,
    Status,
    check_budget,
    combine,
    round_off_of,
)


@dataclass(frozen=True)
class SigmaMax:
    """A largest singular value with its error.

    Attributes:
        value: σ, a lower bound of σ_max(J) up to round-off.
        error: upper estimate of the relative error (σ_max − σ)/σ; inf where nothing is known.
        residual: ‖Jv − σu‖/σ of the vectors (Jᵀu = σv by construction), or ‖Jᵀu − σv‖/σ where the last
            product was a Jv. Uses the largest coupling so far instead of the next one, which would cost one
            more product.
        products: Jv and Jᵀu spent.
        status: EXACT where the Krylov space was exhausted, CONVERGED where `error` ≤ tol.
        confidence: probability that `error` holds; 1 where the space was exhausted.
        left, right: u [m] and v [n], of length 1.
        process: the iteration, for the error at another confidence.
    """

    value: float
    error: float
    residual: float
    products: int
    status: Status
    confidence: float
    left: Tensor = field(repr=False)
    right: Tensor = field(repr=False)
    process: Bidiagonalisation = field(repr=False)

    def upper(self, confidence: float | None = None) -> float:
        """σ(1 + error) ≥ σ_max(J) at `confidence`, by default that of `error`; no product.

        Build upper bounds from this, not from `value`; for a bound from several, use `confidence_of_each`.
        """
        error = self.error if confidence is None else _error(self.process, confidence)
        return self.value * (1 + error) if self.value else 0.0


def sigma_max(
    op: LinearMap,
    *,
    tol: float = 1e-2,
    max_products: int = 64,
    seed: int | None = None,
    confidence: float = CONFIDENCE,
) -> SigmaMax:
    """σ_max of `op` and its vectors. Costs 15–50 products for 1 %: fewer where one value is much larger.

    Args:
        op: the map J [m, n].
        tol: relative error to stop at.
        max_products: budget of Jv and Jᵀu together; at least 2.
        seed: of the random start; by default the vector that a `JacobianOperator` was checked with, whose
            product is known, else 0.
        confidence: probability that the start's component along v_max is as large as the error assumes.

    Raises:
        ValueError: a budget under 2; a confidence outside (0, 1).
        FloatingPointError: where a product is not finite.

    Examples:
        >>> found = sigma_max(Matrix(torch.diag(torch.arange(1.0, 41.0))), tol=1e-3)
        >>> round(found.value, 2), str(found.status)
        (40.0, 'converged')
    """
    check_budget(max_products, confidence)
    start = getattr(op, "known_product", None) if seed is None else None
    process = Bidiagonalisation(op, seed=seed or 0, start=start and start[0], image=start and start[1])
    while True:
        process.half_step()
        error = _error(process, confidence)
        if process.exhausted:
            exact = error <= max(tol, 8 * torch.finfo(op.dtype).eps)
            return _result(process, Status.EXACT if exact else Status.NOT_CONVERGED, error, 1.0)
        if error <= tol:
            return _result(process, Status.CONVERGED, error, confidence)
        if process.products + 1 > max_products:
            return _result(process, Status.NOT_CONVERGED, error, confidence)


def _error(process: Bidiagonalisation, confidence: float) -> float:
    """Relative error of the largest Ritz value: the bound's error plus round-off."""
    noise = 3 * process.noise / process.largest if process.largest else 0.0
    count = 1 if process.exhausted else len(process.alpha)
    return max(process.error(confidence), 8 * round_off_of(process.op) * count, noise)


def _result(process: Bidiagonalisation, status: Status, error: float, confidence: float) -> SigmaMax:
    """The largest triple of the current B̂."""
    op = process.op
    spent = process.products
    if not process.alpha:  # J v₁ = 0 for a random v₁: the map is zero
        left, right = (torch.zeros(size, dtype=op.dtype, device=op.device) for size in op.shape)
        return SigmaMax(0.0, 0.0, 0.0, spent, status, confidence, left, right, process)
    x, values, y = np.linalg.svd(process.bidiagonal(), full_matrices=False)
    last = 0.0 if process.exhausted else float(abs(x[-1, 0] if process.is_half_way else y[0, -1]))
    value = float(values[0])
    residual = last * max(*process.alpha, *process.beta, 0.0) / value
    left, right = combine(process.left, x[:, 0]), combine(process.right, y[0])
    return SigmaMax(value, error, residual, spent, status, confidence, left, right, process)
