"""The k largest singular values with true-error bounds, counted with multiplicity.

A Krylov space of one start finds each value once, whatever its multiplicity, and a residual does not show
what the start has missed. So a second process starts at random in the complement of the first, and so on.
Only converged triples of a finished process are kept: the others would be coupled to the complement and count
as one more large value. On the kept bases U, V, M = UᵀJV and R = UᵀJ(I − VVᵀ) are known without another
product, (I − UUᵀ)JV = 0, and with J₂ = (I − UUᵀ) J (I − VVᵀ)

    JJᵀ ≼ diag(MMᵀ + (1 + ε) RRᵀ, (1 + 1/ε) s² I)    for any ε > 0 and s ≥ ‖J₂‖  (2|xy| ≤ ε|x|² + |y|²/ε),

so σ_i² is at most the i-th eigenvalue of the right side, while the σ_i(M) of all bases are lower bounds. s is
the probabilistic bound of `sigma_max` for the last process.

Sources: Golub & Kahan 1965; Hochstenbach 2013, "Probabilistic upper bounds for the matrix two-norm".
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf, log, sqrt

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
    least_component,
    round_off_of,
)
from normscope.linalg.maps import Deflated
from normscope.linalg.subspaces import Projector


@dataclass(frozen=True)
class TopSingular:
    """The k largest singular values, descending, with their errors.

    Attributes:
        values: σ (k,), each a lower bound up to round-off.
        errors: upper estimates (k,) of the relative errors (σ_i(J) − σ_i)/σ_i.
        round_off: absolute; a value below it is given as 0, with the error 0 where the map was exhausted.
        products: Jv and Jᵀu spent.
        starts: number of random starts: more than two where values are repeated or were missed.
        status: EXACT where the map was exhausted, CONVERGED where all errors are ≤ tol.
        left, right: U [m, k] and V [n, k], orthonormal columns; in a cluster they span its subspace. Fewer
            columns where fewer values were found.
    """

    values: np.ndarray
    errors: np.ndarray
    round_off: float
    products: int
    starts: int
    status: Status
    left: Tensor = field(repr=False)
    right: Tensor = field(repr=False)

    @property
    def error(self) -> float:
        """The largest of `errors`."""
        return float(self.errors.max())


def top_singular(
    op: LinearMap,
    k: int,
    *,
    tol: float = 1e-2,
    max_products: int = 256,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> TopSingular:
    """The k largest singular values of `op`, counted with multiplicity, and their vectors.

    Costs about 2–7 products per value, up to 17 where values are close, and 4–40 in all to prove that none
    was missed: about 145 for the 20 largest of a deep stack to 1 % (`normscope bench spectra`).

    Args:
        op: the map J [m, n].
        k: number of values, at most min(m, n).
        tol, max_products, confidence: as in `sigma_max`, for every value.
        seed: of the random starts.

    Raises:
        ValueError: a k that the map does not have; a budget under 2; a confidence outside (0, 1).
        FloatingPointError: where a product is not finite.

    Examples:
        >>> found = top_singular(Matrix(torch.diag(torch.arange(1.0, 41.0))), 2, tol=1e-3)
        >>> [round(float(value), 3) for value in found.values], str(found.status)
        ([40.0, 39.0], 'converged')
    """
    if not 1 <= k <= min(op.shape):
        raise ValueError(f"k={k} for a map of shape {op.shape}: expected 1 to {min(op.shape)}")
    check_budget(max_products, confidence)
    search = _Search(op, k, seed, confidence, tol)
    while search.products < max_products:
        search.half_step()
        if search.is_exhausted:
            return search.result(Status.EXACT)
        if float(search.errors().max()) <= tol:
            return search.result(Status.CONVERGED)
        if search.is_hopeless() and search.is_time_to_start():
            search.start_anew()
    return search.result(Status.NOT_CONVERGED)


SETTLED = 1e-2
"""Largest error from the couplings of kept triples, at any tolerance, when a new process starts."""

KEPT = 0.02
"""Largest coupling, relative to σ_k, of a triple that is kept for the next processes. A more strongly coupled
one would count as an additional value; the next process finds it again."""

LEAST_STEPS = 4  # fewest steps before the next process starts: each start recomputes all bounds

_EPSILONS = np.geomspace(1e-4, 1e8, 37)


@dataclass(frozen=True)
class _Part:
    """J on two bases: JV = UM and JᵀU = VMᵀ + Σ_f rest_f weights_fᵀ.

    Attributes:
        left, right: U [p, m] and V [q, n] as rows.
        matrix: M (p, q).
        weights: (p, F), a column for each process that was not exhausted.
        rests: F vectors [n] outside of V, float64: the next directions of those processes.
    """

    left: Tensor
    right: Tensor
    matrix: np.ndarray
    weights: np.ndarray
    rests: list[Tensor]

    def coupling(self) -> np.ndarray:
        """L (p, F) with LLᵀ = RRᵀ, R = UᵀJ(I − VVᵀ): R = LQ squares nothing."""
        if not self.rests:
            return self.weights
        factor = torch.linalg.qr(torch.stack(self.rests, 1), mode="r").R
        return self.weights @ factor.T.cpu().numpy()

    def bounds(self, epsilon: float, k: int) -> np.ndarray:
        """Roots (k,) of the largest eigenvalues of MMᵀ + (1 + ε) RRᵀ."""
        wide = np.concatenate((self.matrix, sqrt(1 + epsilon) * self.coupling()), 1)
        return _first(np.linalg.svd(wide, compute_uv=False), k)

    def converged(self, most: float, k: int) -> "_Part":
        """The part on the first k singular triples of M and those coupled by no more than `most`."""
        x, theta, yt, loose = self._triples(most, k)
        left, right = combine(self.left, x[:, ~loose]), combine(self.right, yt[~loose].T)
        return _Part(left, right, np.diag(theta[~loose]), x.T[~loose] @ self.weights, self.rests)

    def left_over(self, most: float, k: int) -> np.ndarray:
        """Values of the other triples, descending: a new process will find them."""
        _, theta, _, loose = self._triples(most, k)
        return theta[loose] if loose.any() else theta[-1:]

    def _triples(self, most: float, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        x, theta, yt = np.linalg.svd(self.matrix, full_matrices=False)
        loose = np.linalg.norm(x.T @ self.coupling(), axis=1) > most
        loose[:k] = False
        return x, theta, yt, loose


class _Search:
    """Processes one after another, each in the complement of those before; and the bounds."""

    def __init__(self, op: LinearMap, k: int, seed: int, confidence: float, tol: float) -> None:
        self.op, self.k, self.seed, self.confidence, self.tol = op, k, seed, confidence, tol
        self.starts, self._products, self._scale = 1, 0, 0.0
        left, right = (torch.zeros(0, size, dtype=op.dtype, device=op.device) for size in op.shape)
        self.done = _Part(left, right, np.zeros((0, 0)), np.zeros((0, 0)), [])
        self._inside = np.zeros((0, 0))  # coordinates of the rests of `done` in the new rows of V
        self._rests: list[Tensor] = []  # the parts of the rests outside of these rows
        self.now = Bidiagonalisation(op, seed=seed)
        self.is_exhausted = self._left_over_is_zero = False
        self._bounds = np.zeros((len(_EPSILONS), k))  # √λ_i(ε) of the part that is done
        self._values = np.zeros(k)

    @property
    def products(self) -> int:
        return self._products + self.now.products

    def half_step(self) -> None:
        """One product, of a new process where the running one is exhausted."""
        if self.now.exhausted:
            self.start_anew()
        if not self.now.exhausted:
            self.now.half_step()
            self._follow()
        self._values = _first(np.linalg.svd(self._matrix(), compute_uv=False), self.k)
        if self.now.exhausted and not self.now.alpha:  # J₂ = 0: the rest of J is in R
            self._left_over_is_zero = True
            self.is_exhausted = float(np.linalg.norm(self.done.coupling())) <= self.floor

    def start_anew(self) -> None:
        """Keep the converged triples of the running process; start the next at random in the complement."""
        part = self._known()
        self.done = part if self.now.exhausted else part.converged(self._most, self.k)
        for row, epsilon in enumerate(_EPSILONS):
            self._bounds[row] = self.done.bounds(epsilon, self.k)
        self._rests, self._inside = list(self.done.rests), np.zeros((len(self.done.rests), 0))
        self._products += self.now.products
        self._scale = max(self._scale, *self.now.alpha, *self.now.beta, 0.0)
        deflated = Deflated(self.op, kernel=_onto(self.done.right), left_kernel=_onto(self.done.left))
        self.now = Bidiagonalisation(
            deflated,
            seed=self.seed + 7919 * self.starts,
            start=max(self._rests, key=lambda rest: float(rest.norm())) if self._left_over_is_zero else None,
            within=(deflated.keep_right, deflated.keep_left),
            scale=self._scale,
        )
        self.starts += 1

    def is_hopeless(self) -> bool:
        """Whether even the lower bound of ‖J₂‖ is too large to prove the values."""
        if not self.now.alpha or self._values[-1] == 0:
            return False
        allowed = self._values * (1 + self.tol)
        if self.starts == 1:
            return self.now.largest > allowed[-1]
        feasible = _EPSILONS[(self._bounds <= allowed).all(1)]
        return not len(feasible) or self.now.largest * sqrt(1 + 1 / feasible[-1]) > allowed[-1]

    def is_time_to_start(self) -> bool:
        """Whether a new process proves the k values sooner now than after more steps of this one.

        ‖J₂‖ is the largest value that has not converged. Proving that it is r times smaller than allowed
        takes about ln(4n/δ²)/(2 arcosh r) products.
        """
        if self.now.is_half_way or len(self.now.alpha) < LEAST_STEPS:
            return False
        part = self._known()
        most = self._values[-1] * (1 + self.tol)
        if not self._is_best_now(part, most):
            return False
        kept = part.converged(self._most, self.k)
        allowed = self._values * (1 + min(self.tol, SETTLED))
        settled = bisect_left(_EPSILONS, True, key=lambda e: bool((kept.bounds(e, self.k) > allowed).any()))
        return settled > 0 and self._is_best_now(part, most / sqrt(1 + 1 / _EPSILONS[settled - 1]))

    def _is_best_now(self, part: _Part, most: float) -> bool:
        """Whether to prove ‖J₂‖ ≤ `most` now, rather than after more values have converged."""
        ratios = np.maximum(most / part.left_over(self._most, self.k), 1)
        reach = log(4 * self.op.shape[1] / least_component(self.confidence) ** 2) / 2
        with np.errstate(divide="ignore"):
            proofs = reach / np.arccosh(ratios)
        found = max(1, len(part.matrix) - len(self.done.matrix) - len(ratios))
        waits = self.now.products / found * np.arange(len(proofs))
        return bool(np.isfinite(proofs[0])) and int((proofs + waits).argmin()) == 0

    @property
    def _most(self) -> float:
        return KEPT * float(self._values[-1])

    def errors(self) -> np.ndarray:
        """Relative errors (k,) of the current values."""
        values = self._values
        upper = values if self.is_exhausted else np.maximum(self._upper(), values)
        relative = np.divide(upper - values, values, out=np.full(self.k, inf), where=values > 0)
        floor = np.divide(self.floor, values, out=np.full(self.k, inf), where=values > 0)
        errors = relative + floor
        return np.where(values > self.floor, errors, 0.0 if self.is_exhausted else inf)

    @property
    def floor(self) -> float:
        """Round-off relative to the largest value: of a sum, and the one that ends a process."""
        size = len(self.done.matrix) + len(self.now.alpha)
        units = max(8 * size, 10 * sqrt(self.op.shape[1]) if self.is_exhausted else 0)
        return units * round_off_of(self.op) * float(self._values[0])

    def _upper(self) -> np.ndarray:
        """Upper bounds (k,) of the k largest; the bound of ‖J‖ before the first process is finished."""
        if not self.now.alpha or (self.starts == 1 and self.is_hopeless()):
            return np.full(self.k, inf)
        rest = self.now.largest * (1 + self.now.error(self.confidence))
        if self.starts == 1:
            return np.full(self.k, rest)
        return least_upper(self._bounds, rest)

    def result(self, status: Status) -> TopSingular:
        """The current values and vectors."""
        part = self._known()
        left, _, right = np.linalg.svd(part.matrix, full_matrices=False)
        return TopSingular(
            values=np.where(self._values > self.floor, self._values, 0.0),
            errors=self.errors(),
            round_off=self.floor,
            products=self.products,
            starts=self.starts,
            status=status,
            left=combine(part.left, left[:, : self.k]).T,
            right=combine(part.right, right[: self.k].T).T,
        )

    def _follow(self) -> None:
        """Split the rests of the finished part by the new rows of V."""
        for row in self.now.known_right[self._inside.shape[1] :].double():
            weights = [float(row @ rest) for rest in self._rests]
            self._rests = [rest - weight * row for rest, weight in zip(self._rests, weights, strict=True)]
            self._inside = np.concatenate((self._inside, np.array(weights).reshape(-1, 1)), 1)

    def _matrix(self) -> np.ndarray:
        """M of the finished part and the running process."""
        block = self.now.known
        upper = np.concatenate((self.done.matrix, self.done.weights @ self._inside), 1)
        lower = np.concatenate((np.zeros((len(block), self.done.matrix.shape[1])), block), 1)
        return np.concatenate((upper, lower))

    def _known(self) -> _Part:
        """The finished part and the running process together; after a whole step."""
        count = len(self.now.alpha)
        weights = np.concatenate((self.done.weights, np.zeros((count, len(self._rests)))))
        rests = list(self._rests)
        if count and not self.now.exhausted and not self.now.is_half_way:
            last = np.zeros((len(weights), 1))
            last[-1] = self.now.beta[-1]
            weights = np.concatenate((weights, last), 1)
            rests.append(self.now.right[-1].double())
        left = torch.cat((self.done.left, self.now.left))
        right = torch.cat((self.done.right, self.now.known_right))
        return _Part(left, right, self._matrix(), weights, rests)


def least_upper(bounds: np.ndarray, rest: float) -> np.ndarray:
    """Upper bounds (k,) of the σ_i, the best over ε, from √λ_i(ε) (E, k) of the finished part and `rest`."""
    floors = rest * np.sqrt(1 + 1 / _EPSILONS)
    return np.maximum(bounds, floors[:, None]).min(0)


def _onto(rows: Tensor) -> Projector:
    """Projector onto orthonormal rows, in float64 because the complement is small."""
    exact = rows.double()
    return lambda v: ((v.double() @ exact.T) @ exact).to(v.dtype)


def _first(values: np.ndarray, k: int) -> np.ndarray:
    """The first k values, padded with zeros."""
    return np.pad(values[:k], (0, max(0, k - len(values))))
