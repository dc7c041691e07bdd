"""Largest singular value by Golub–Kahan–Lanczos bidiagonalisation with full reorthogonalisation.

After k steps from a random unit v₁:  J V_k = U_k B_k,  Jᵀ U_k = V_{k+1} B̂_kᵀ,  B_k upper bidiagonal, and
σ_max(B_k) is a lower bound of σ_max(J). The residual says nothing about what v₁ has missed, so the stop is
by an *upper* bound too: v₁ has the mass ω = ⟨v₁, v_max⟩² on σ_max² = λ, and mass is bounded by the
Christoffel function of the Lanczos polynomials,

    ω · Σ_{j≤k} p̂_j(λ)² ≤ 1,      p̂_j from the three-term recurrence of B_kᵀB_k.

For a random v₁ in n dimensions ω ≥ δ²/n but for a chance of P(|N(0,1)| < δ); the λ at which the sum reaches
n/δ² is then the bound. Sources: Golub & Kahan 1965; Hochstenbach 2013, "Probabilistic upper bounds for the
matrix two-norm".
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, sqrt
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

CONFIDENCE = 0.999
"""Chance that v₁ is no worse than assumed. A hidden spike makes the bound fail about that often."""


class LinearMap(Protocol):
    """What the algorithms need of a map J [m, n]; `JacobianOperator` is one."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def matvec(self, v: Tensor) -> Tensor:
        """Jv [m] of v [n]."""

    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀu [n] of u [m]."""


class Status(StrEnum):
    """How an iteration ended."""

    EXACT = "exact"
    CONVERGED = "converged"
    NOT_CONVERGED = "not converged"

    @property
    def remedy(self) -> str:
        """What a caller can do about it."""
        if self is Status.NOT_CONVERGED:
            return "give more products, or a larger tolerance; in float32 nothing under about 1e-5 can be had"
        return "nothing to do"


@dataclass(frozen=True)
class SigmaMax:
    """A largest singular value, and how far it is to be trusted.

    Attributes:
        value: σ, a lower bound of σ_max(J) up to round-off.
        error: upper estimate of the relative error (σ_max − σ)/σ; inf where nothing is known.
        residual: ‖Jᵀu − σv‖/σ of the vectors (Jv = σu holds by construction).
        products: Jv and Jᵀu spent.
        status: EXACT where the Krylov space was exhausted, CONVERGED where `error` ≤ tol.
        left, right: u [m] and v [n], of length 1.
    """

    value: float
    error: float
    residual: float
    products: int
    status: Status
    left: Tensor = field(repr=False)
    right: Tensor = field(repr=False)


def sigma_max(
    op: LinearMap, *, tol: float = 1e-2, max_products: int = 64, seed: int = 0, confidence: float = CONFIDENCE
) -> SigmaMax:
    """σ_max of `op` and its vectors.

    Args:
        op: the map J [m, n].
        tol: relative error to stop at.
        max_products: budget of Jv and Jᵀu together; at least 2.
        seed: of the random start.
        confidence: chance that the start has the component along v_max that the error estimate assumes.

    Returns:
        The value with error, residual, products and status; see `SigmaMax`.

    Raises:
        FloatingPointError: where a product is not finite.
    """
    if max_products < 2:
        raise ValueError(f"max_products={max_products}: expected at least 2, one Jv and one Jᵀu")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: expected a probability between 0 and 1")
    process = Bidiagonalisation(op, seed=seed)
    while True:
        process.step()
        error = process.error(confidence)
        error = max(error, 8 * torch.finfo(op.dtype).eps * len(process.alpha))
        if process.exhausted:
            return process.result(Status.EXACT, 8 * torch.finfo(op.dtype).eps)
        if error <= tol:
            return process.result(Status.CONVERGED, error)
        if process.products + 2 > max_products:
            return process.result(Status.NOT_CONVERGED, error)


class Bidiagonalisation:
    """The process itself: bases U, V and the bidiagonal (α, β), one step at a time.

    Attributes:
        alpha, beta: diagonal and superdiagonal of B̂.
        exhausted: the Krylov space is invariant: the singular values of B̂ are singular values of J.
        products: Jv and Jᵀu spent.
    """

    def __init__(self, op: LinearMap, *, seed: int = 0, capacity: int = 32) -> None:
        self.op = op
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.exhausted = False
        self.products = 0
        start = torch.randn(op.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._v = [(start / start.norm()).to(op.device, op.dtype)]
        self._u: list[Tensor] = []

    def step(self) -> None:
        """One Jv and one Jᵀu; stops half-way where the space is exhausted."""
        v = self._v[-1]
        alpha, u = self._orthogonal(self.op.matvec(v), self._u)
        self.products += 1
        if u is None:
            self.exhausted = True
            return
        self.alpha.append(alpha)
        self._u.append(u)
        beta, v_next = self._orthogonal(self.op.rmatvec(u), self._v)
        self.products += 1
        if v_next is None:
            self.exhausted = True
            return
        self.beta.append(beta)
        self._v.append(v_next)

    def bidiagonal(self) -> np.ndarray:
        """B̂: [k, k + 1] after a whole step, [k, k] where β_k vanished."""
        k = len(self.alpha)
        matrix = np.zeros((k, max(k, len(self.beta) + 1)))
        matrix[range(k), range(k)] = self.alpha
        for i, beta in enumerate(self.beta[:k]):
            matrix[i, i + 1] = beta
        return matrix

    def error(self, confidence: float = CONFIDENCE) -> float:
        """Relative distance from the Ritz value to the upper bound, the root of the λ where Σ p̂² = 1/ω."""
        k = len(self.alpha)
        if self.exhausted:
            return 0.0
        square = self.bidiagonal()[:, :k]
        gram = square.T @ square
        lower = float(np.linalg.eigvalsh(gram)[-1])
        off = np.array(self.alpha) * np.array(self.beta)  # off-diagonal of BᵀB, the next one included

        def inverse_mass(point: float, enough: float) -> float:
            return _christoffel(point, gram.diagonal(), off, enough)

        threshold = self.op.shape[1] / _least_component(confidence) ** 2
        at_ritz_value = inverse_mass(lower, inf)
        if at_ritz_value >= threshold:
            # Above the Ritz value lies at most the mass 1/at_ritz_value (Chebyshev-Markov-Stieltjes), so v₁
            # is worse than assumed. Given that much, it is above the share 1 − confidence of it.
            threshold = at_ritz_value / (1 - confidence) ** 2
        upper = 2 * lower
        while inverse_mass(upper, threshold) < threshold:
            if upper > 1e12 * lower:
                return inf
            upper *= 2
        low = lower
        for _ in range(40):
            middle = (low + upper) / 2
            if inverse_mass(middle, threshold) < threshold:
                low = middle
            else:
                upper = middle
        return sqrt(upper / lower) - 1

    def result(self, status: Status, error: float) -> SigmaMax:
        """The largest Ritz triple as it stands."""
        m, n = self.op.shape
        if not self.alpha:  # J v₁ = 0 for a random v₁: the map is zero
            zeros = (torch.zeros(size, dtype=self.op.dtype, device=self.op.device) for size in (m, n))
            return SigmaMax(0.0, 0.0, 0.0, self.products, status, *zeros)
        matrix = self.bidiagonal()
        matrix = matrix if self.exhausted else matrix[:, : len(self.alpha)]
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        residual = 0.0 if self.exhausted else self.beta[-1] * abs(left[-1, 0]) / values[0]
        return SigmaMax(
            value=float(values[0]),
            error=error,
            residual=float(residual),
            products=self.products,
            status=status,
            left=_combine(self._u, left[:, 0]),
            right=_combine(self._v, right[0]),
        )

    def _orthogonal(self, vector: Tensor, basis: list[Tensor]) -> tuple[float, Tensor | None]:
        """(norm, unit vector) of what `vector` has beside `basis`; None where only round-off is left."""
        before = _length(vector)
        if not np.isfinite(before):
            raise FloatingPointError("a product with the Jacobian is not finite")
        for _ in range(2):  # classical Gram–Schmidt twice
            for other in basis:
                vector = vector - torch.dot(other, vector) * other
        norm = _length(vector)
        scale = max([before, *self.alpha, *self.beta])
        if norm <= 10 * torch.finfo(self.op.dtype).eps * scale:
            return 0.0, None
        return norm, vector / norm


def _christoffel(point: float, diagonal: np.ndarray, off: np.ndarray, enough: float) -> float:
    """Σ_{j=0}^{k} p̂_j(point)² of the orthonormal Lanczos polynomials; stops where it is `enough`."""
    before, now, total, coupling = 0.0, 1.0, 1.0, 0.0
    for centre, following in zip(diagonal, off, strict=True):
        before, now = now, ((point - centre) * now - coupling * before) / following
        coupling = following
        total += now * now
        if total >= enough:
            break
    return total


def _least_component(confidence: float) -> float:
    """δ with P(|N(0,1)| < δ) = 1 − confidence."""
    return sqrt(2) * float(torch.erfinv(torch.tensor(1 - confidence, dtype=torch.float64)))


def _length(vector: Tensor) -> float:
    """‖vector‖ summed in float64: squares of a deep stack's products underflow in float32."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _combine(basis: list[Tensor], weights: np.ndarray) -> Tensor:
    """Σ weights_i basis_i."""
    columns = torch.stack(basis[: len(weights)], 1)
    return columns @ torch.tensor(weights, dtype=columns.dtype, device=columns.device)
