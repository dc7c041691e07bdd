"""Golub–Kahan–Lanczos bidiagonalisation with full reorthogonalisation, and bounds of the outermost values.

After k steps from a random unit v₁:  J V_k = U_k B_k,  Jᵀ U_k = V_{k+1} B̂_kᵀ,  B_k upper bidiagonal, and
σ_max(B̂_k) is a lower bound of σ_max(J). The residual does not show what v₁ has missed, so an *upper* bound
decides when to stop. v₁ has the mass ω = ⟨v₁, v_max⟩² on σ_max² = λ, and the Christoffel function of the
Lanczos polynomials p̂_j (three-term recurrence of B̂_kᵀB̂_k) bounds it:

    ω · Σ_{j≤k} p̂_j(λ)² ≤ 1

For a random v₁ in n dimensions ω ≥ δ²/n with probability P(|N(0,1)| ≥ δ); the bound is the λ at which the
sum reaches n/δ². After half a step, with Jv_{k+1} but not the next Jᵀu, the same holds for the polynomials of
B_{k+1}B_{k+1}ᵀ and the measure of u₁ = Jv₁/α₁, in which λ has the mass ωλ/α₁². So it may stop after any
product.

Sources: Golub & Kahan 1965; Hochstenbach 2013, "Probabilistic upper bounds for the matrix two-norm".
"""

from collections.abc import Callable
from enum import StrEnum
from math import inf, sqrt
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from normscope.linalg.subspaces import Projector

CONFIDENCE = 0.999  # probability that v₁ is at least as good as assumed, and so that the bound holds


class LinearMap(Protocol):
    """Interface of a map J [m, n] for the algorithms; `JacobianOperator` implements it."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def matvec(self, v: Tensor) -> Tensor:
        """Jv [m] of v [n]."""

    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀu [n] of u [m]."""


def round_off_of(op: LinearMap) -> float:
    """Error of a product relative to ‖J‖: the map's own `round_off`, else ε of its dtype."""
    return float(getattr(op, "round_off", torch.finfo(op.dtype).eps))


class Status(StrEnum):
    """Outcome of an iteration."""

    EXACT = "exact"
    CONVERGED = "converged"
    NOT_CONVERGED = "not converged"


def check_confidence(confidence: float) -> None:
    """Raise ValueError for a confidence that is not a probability between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: expected a probability between 0 and 1")


def check_budget(max_products: float, confidence: float) -> None:
    """Raise ValueError for a budget under 2 products or an invalid confidence."""
    if max_products < 2:
        raise ValueError(f"max_products={max_products}: expected at least 2, one Jv and one Jᵀu")
    check_confidence(confidence)


class Bidiagonalisation:
    """The iteration: bases U, V and the bidiagonal (α, β), one product at a time.

    Args:
        op: the map.
        seed: of the random start.
        start: v₁ [n], of any length, instead of a random one; the bounds hold for random ones.
        image: J·start [m] where it is known; it saves the first product.
        within: projectors of inputs and outputs onto the subspaces of the iteration; default all. Every
            vector is projected, because round-off would bring back the complement.
        scale: size of the map that `op` is a part of: round-off relative to it counts as zero.

    Attributes:
        alpha, beta: diagonal and superdiagonal of B̂.
        exhausted: True where the Krylov space is invariant: singular values of B̂ are singular values of J.
        products: Jv and Jᵀu spent.
        noise: size of a product's error in the recurrence; it is larger where parts of a map cancel.
    """

    def __init__(
        self,
        op: LinearMap,
        *,
        seed: int = 0,
        start: Tensor | None = None,
        image: Tensor | None = None,
        within: tuple[Projector, Projector] | None = None,
        scale: float = 0.0,
    ) -> None:
        self.op = op
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.exhausted = False
        self.products = 0
        self.noise = 0.0
        self._image: Tensor | None = None
        self._scale = scale
        if start is None:
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(op.shape[1], generator=generator, dtype=torch.float64)
        start = start.to(op.device, op.dtype)
        keep_right, keep_left = within or (None, None)
        self._v, self._u = _Basis(op.shape[1], op, keep_right), _Basis(op.shape[0], op, keep_left)
        start = self._v.kept(start)
        length = _length(start)
        if length == 0:  # the subspace has no dimension
            self.exhausted = True
            return
        self._v.append(start / length)
        self._image = None if image is None or within else image.to(op.device, op.dtype) / length

    @property
    def right(self) -> Tensor:
        """V as rows [k or k + 1, n]: one more than U while the iteration can go on."""
        return self._v.rows

    @property
    def known_right(self) -> Tensor:
        """V as rows, one for each column of `known`."""
        return self.right if self.exhausted else self.right[: len(self.alpha)]

    @property
    def left(self) -> Tensor:
        """U as rows [k, m]."""
        return self._u.rows

    @property
    def is_half_way(self) -> bool:
        """Whether the next product is a Jᵀu: B is known then, the next β is not."""
        return len(self.alpha) > len(self.beta)

    def step(self) -> None:
        """One Jv and one Jᵀu; stops half-way where the space is exhausted."""
        self.half_step()
        if not self.exhausted:
            self.half_step()

    def half_step(self) -> None:
        """One product: a Jv after a whole step, a Jᵀu after half a step."""
        if self.is_half_way:
            image, basis, entries = self.op.rmatvec(self._u.rows[-1]), self._v, self.beta
            self.products += 1
        elif self._image is not None:
            image, basis, entries, self._image = self._image, self._u, self.alpha, None
        else:
            image, basis, entries = self.op.matvec(self._v.rows[-1]), self._u, self.alpha
            self.products += 1
        entry, vector = self._orthogonal(image, basis)
        if vector is None:
            self.exhausted = True
            return
        entries.append(entry)
        basis.append(vector)

    def bidiagonal(self) -> np.ndarray:
        """B̂: [k, k + 1] after a whole step, B [k, k] half-way and where β_k vanished."""
        k = len(self.alpha)
        matrix = np.zeros((k, max(k, len(self.beta) + 1)))
        matrix[range(k), range(k)] = self.alpha
        for i, beta in enumerate(self.beta[:k]):
            matrix[i, i + 1] = beta
        return matrix

    @property
    def known(self) -> np.ndarray:
        """B [k, k]; B̂ where the space is exhausted."""
        return self.bidiagonal()[:, : len(self.known_right)]

    def ritz_values(self) -> np.ndarray:
        """Singular values (k,) of `known`, descending."""
        return np.linalg.svd(self.known, compute_uv=False)

    @property
    def largest(self) -> float:
        """The largest singular value of B̂: the best lower bound of σ_max that the products give."""
        return float(np.linalg.norm(self.bidiagonal(), 2)) if self.alpha else 0.0

    def error(self, confidence: float = CONFIDENCE) -> float:
        """Relative distance from `largest` to the upper bound, the root of the λ where Σ p̂² = 1/ω."""
        if self.exhausted:
            return 0.0
        lower = (self.largest / self.alpha[0]) ** 2
        is_possible = self._mass_test(lower, confidence)
        upper = 2 * lower
        while is_possible(upper):
            if upper > 1e12 * lower:
                return inf
            upper *= 2
        return sqrt(_edge(is_possible, lower, upper) / lower) - 1

    def error_below(self, confidence: float = CONFIDENCE) -> float:
        """Relative distance from the smallest Ritz value down to the lower bound of the singular values,
        found as in `error`; 1 where they may reach zero."""
        if self.exhausted:
            return 0.0
        lower = (float(self.ritz_values()[-1]) / self.alpha[0]) ** 2
        is_possible = self._mass_test(lower, confidence)
        if lower == 0 or is_possible(0.0):
            return 1.0
        return 1 - sqrt(_edge(is_possible, lower, 0.0) / lower)

    def _mass_test(self, ritz_square: float, confidence: float) -> Callable[[float], bool]:
        """Test whether a singular value with the square λ, beyond an outermost Ritz value, is possible.

        Squares are in units of α₁², which neither under- nor overflow.
        """
        least = least_component(confidence) ** 2 / self.op.shape[1]
        at_ritz_value = self._most_mass(ritz_square, 0.0)
        if at_ritz_value <= least:
            # No more mass lies beyond the Ritz value (Chebyshev-Markov-Stieltjes), so v₁ is worse than
            # assumed. Of that mass, at least the share 1 − confidence is then assumed.
            least = at_ritz_value * (1 - confidence) ** 2
        return lambda point: self._most_mass(point, least) > least

    def _most_mass(self, point: float, least: float) -> float:
        """The most mass that v₁ can have on λ = `point` and beyond, exactly where it is over `least`."""
        alpha, beta = np.array(self.alpha) / self.alpha[0], np.array(self.beta) / self.alpha[0]
        if not self.is_half_way:
            diagonal = alpha**2 + np.append(0.0, beta[:-1] ** 2)  # of BᵀB, and the next coupling
            return 1 / _christoffel(point, diagonal, alpha * beta, 1 / least if least else inf)
        if point == 0:  # BBᵀ does not show the kernel
            return 1.0
        share = point / alpha[0] ** 2  # mass of u₁ on λ over that of v₁
        diagonal, enough = alpha[:-1] ** 2 + beta**2, 1 / (share * least) if least else inf
        return 1 / (share * _christoffel(point, diagonal, beta * alpha[1:], enough))

    def triple(self, index: int) -> tuple[float, float, Tensor, Tensor]:
        """Ritz value of `known`, relative residual and vectors u [m], v [n], by index in descending order."""
        left, values, right = np.linalg.svd(self.known, full_matrices=False)
        value, residual = float(values[index]), 0.0
        if not self.exhausted:
            residual = self.beta[-1] * abs(left[-1, index]) / value if value else inf
        u, v = combine(self.left, left[:, index]), combine(self.right, right[index])
        return value, float(residual), u, v

    def _orthogonal(self, vector: Tensor, basis: "_Basis") -> tuple[float, Tensor | None]:
        """(norm, unit vector) of the part of `vector` outside of `basis`; None where that is round-off."""
        before = _length(vector)
        if not np.isfinite(before):
            raise FloatingPointError("a product with the Jacobian is not finite")
        weights = basis.rows @ vector
        if len(weights) > 1:  # all but the last hold only round-off of the product
            rest = _length(weights[:-1]) * sqrt(len(vector) / (len(weights) - 1))
            self.noise = max(self.noise, rest)
        vector = basis.kept(vector - weights @ basis.rows)
        # Classical Gram–Schmidt twice: a dot product of 1e5 numbers in float32 has an error of 1e-5.
        weights = (basis.rows.double() @ vector.double()).to(vector.dtype)
        vector = basis.kept(vector - weights @ basis.rows)
        norm = _length(vector)
        scale = max([before, self._scale, *self.alpha, *self.beta])
        if norm <= 10 * torch.finfo(self.op.dtype).eps * scale:
            return 0.0, None
        return norm, vector / norm


class _Basis:
    """Rows in one growing block of memory: two matrix-vector products orthogonalise against all."""

    def __init__(self, size: int, like: LinearMap, keep: Projector | None) -> None:
        self._block = torch.empty(8, size, dtype=like.dtype, device=like.device)
        self._count, self._keep = 0, keep

    def kept(self, vector: Tensor) -> Tensor:
        """Part of a vector inside the subspace."""
        return vector if self._keep is None else self._keep(vector)

    @property
    def rows(self) -> Tensor:
        return self._block[: self._count]

    def append(self, row: Tensor) -> None:
        if self._count == len(self._block):
            self._block = torch.cat((self._block, torch.empty_like(self._block)))
        self._block[self._count] = row
        self._count += 1


def _edge(is_possible: Callable[[float], bool], inside: float, outside: float) -> float:
    """Bisect for the edge of `is_possible` between `inside` and `outside`; return the outer side."""
    for _ in range(40):
        middle = (inside + outside) / 2
        if is_possible(middle):
            inside = middle
        else:
            outside = middle
    return outside


def _christoffel(point: float, diagonal: np.ndarray, off: np.ndarray, enough: float) -> float:
    """Σ_{j=0}^{k} p̂_j(point)² of the orthonormal Lanczos polynomials; stops where it is `enough`."""
    before, now, total, coupling = 0.0, 1.0, 1.0, 0.0
    for centre, following in zip(diagonal.tolist(), off.tolist(), strict=True):
        before, now = now, ((point - centre) * now - coupling * before) / following
        coupling = following
        total += now * now
        if total >= enough:
            break
    return total


def least_component(confidence: float) -> float:
    """δ with P(|N(0,1)| < δ) = 1 − confidence."""
    return sqrt(2) * float(torch.erfinv(torch.tensor(1 - confidence, dtype=torch.float64)))


def _length(vector: Tensor) -> float:
    """‖vector‖ in float64, in units of its largest entry: squares of a deep stack's products underflow."""
    largest = vector.abs().max().double() if len(vector) else torch.zeros(())
    if not largest or not largest.isfinite():
        return float(largest)
    return float(largest * torch.linalg.vector_norm(vector.double() / largest))


def combine(rows: Tensor, weights: np.ndarray) -> Tensor:
    """Σ weights_i rows_i, [n] of rows [k, n]; a matrix of weights (k, r) gives [r, n]."""
    return torch.tensor(weights.T.copy(), dtype=rows.dtype, device=rows.device) @ rows[: len(weights)]
