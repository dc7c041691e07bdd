"""The k largest singular values with true-error bounds, counted with multiplicity.

A Krylov space of one start sees each value once, however often it is there, and a residual says nothing about
what the start has missed. So once the residuals of the first process are small, a second one starts at random
in what the first has left over, J₂ = (I − UUᵀ) J (I − VVᵀ), and so on. With M = UᵀJV of all bases but the
last process's, and the couplings R = UᵀJ(I − VVᵀ), of which every entry is known without another product,

    JJᵀ ≼ diag(MMᵀ + (1 + ε) RRᵀ, (s² + g²/ε) I)    for any ε > 0 and s ≥ ‖J₂‖  (2|xy| ≤ ε|x|² + |y|²/ε),

so σ_i² is at most the i-th eigenvalue of the right side, while the σ_i(M) of all bases are lower bounds. s is
the probabilistic bound of `sigma_max` for the last process. g ≤ s is the gain of J₂ on the row space of R:
that is where the processes before would have gone on, and one more Jv of each tells it.

Sources: Golub & Kahan 1965; Hochstenbach 2013, "Probabilistic upper bounds for the matrix two-norm".
"""

from dataclasses import dataclass, field
from math import inf, sqrt

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
from normscope.linalg.maps import Deflated
from normscope.linalg.subspaces import Projector


@dataclass(frozen=True)
class TopSingular:
    """The k largest singular values, descending, and how far they are to be trusted.

    Attributes:
        values: σ (k,), each a lower bound up to round-off.
        errors: upper estimates (k,) of the relative errors (σ_i(J) − σ_i)/σ_i.
        round_off: absolute; a value below it is given as 0, with the error 0 where the map was exhausted.
        products: Jv and Jᵀu spent.
        starts: random starts: more than two where values are repeated or were missed.
        status: EXACT where the map was exhausted, CONVERGED where all errors are ≤ tol.
        left, right: U [m, k] and V [n, k], orthonormal columns; in a cluster they span its subspace. Fewer
            columns where the values in hand are fewer.
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

    Costs about 2–4 products a value, and 4–20 to see that none was missed.

    Args:
        op: the map J [m, n].
        k: how many, at most min(m, n).
        tol: relative error to stop at, of every value.
        max_products: budget of Jv and Jᵀu together; at least 2.
        seed: of the random starts.
        confidence: chance that a start has the component that the error estimate assumes.

    Returns:
        Values with errors, products and status; see `TopSingular`.

    Raises:
        ValueError: a k that the map does not have; a budget under 2; a confidence outside (0, 1).
        FloatingPointError: where a product is not finite.

    Example:
        >>> from normscope.linalg.maps import Matrix
        >>> found = top_singular(Matrix(torch.diag(torch.arange(1.0, 41.0))), 2, tol=1e-3)
        >>> [round(float(value), 3) for value in found.values], str(found.status)
        ([40.0, 39.0], 'converged')
    """
    if not 1 <= k <= min(op.shape):
        raise ValueError(f"k={k} for a map of shape {op.shape}: expected 1 to {min(op.shape)}")
    check_budget(max_products, confidence)
    search = _Search(op, k, seed, confidence, tol)
    while search.products + 2 <= max_products:
        search.step()
        if search.is_exhausted:
            return search.result(Status.EXACT)
        if search.error() <= tol:
            return search.result(Status.CONVERGED)
        can_start = len(search.now.alpha) >= LEAST_STEPS and search.products + 3 <= max_products
        if can_start and search.is_hopeless() and search.is_settled():
            search.start_anew()
    return search.result(Status.NOT_CONVERGED)


SETTLED = 1e-2
"""What the residuals of a process allow at most, whatever the tolerance, before the next one starts: values
that still move leave much over for the next process to find."""

LEAST_STEPS = 4
"""Of a process that is given up for the next: each start costs a product and all bounds anew."""

LEFT_OVER = 0.95
"""Of σ_k: the most that a new start is expected to find, when it is decided to start it."""

_EPSILONS = np.geomspace(1e-4, 1e8, 37)


class _Search:
    """Processes one after another, each in what those before have left over; and the bounds."""

    def __init__(self, op: LinearMap, k: int, seed: int, confidence: float, tol: float) -> None:
        self.op, self.k, self.seed, self.confidence, self.tol = op, k, seed, confidence, tol
        self.done: list[Bidiagonalisation] = []
        self.now = Bidiagonalisation(op, seed=seed)
        self.is_exhausted = self._left_over_is_zero = False
        self._bounds = np.zeros((len(_EPSILONS), k))  # √λ_i(ε) of the processes that are done
        self._values = np.zeros(k)
        self._images: list[Tensor] = []  # β J v_{k+1} of each process that is done and could go on
        self._gain = inf  # g
        self._products = 0

    @property
    def products(self) -> int:
        return self._products + self.now.products

    def step(self) -> None:
        """One step; of a new process where the one that runs has come to its end."""
        if self.now.exhausted:
            self.start_anew()
        if not self.now.exhausted:
            self.now.step()
        matrix, coupling = self._projected([*self.done, self.now])
        self._values = _first(np.linalg.svd(matrix, compute_uv=False), self.k)
        if self.now.exhausted and not self.now.alpha:  # J₂ = 0: all that is left over is in R
            self._left_over_is_zero = True
            self.is_exhausted = float(np.linalg.norm(coupling)) <= self.floor

    def start_anew(self) -> None:
        """Settle the process that runs; start the next at random in what is left over."""
        self._products += self.now.products
        if not self.now.exhausted:
            self._images.append(self.now.beta[-1] * self.now.op.matvec(self.now.right[-1]).double())
            self._products += 1
        self.done.append(self.now)
        matrix, coupling = self._projected(self.done)
        self._gain = self._outside_gain()
        for row, epsilon in enumerate(_EPSILONS):
            self._bounds[row] = _bounds(matrix, coupling, epsilon, self.k)
        deflated = Deflated(
            self.op,
            kernel=_onto(torch.cat([_right(process) for process in self.done])),
            left_kernel=_onto(torch.cat([process.left for process in self.done])),
        )
        scale = max((*self.done[0].alpha, *self.done[0].beta), default=0.0)
        seed = self.seed + 7919 * len(self.done)
        self.now = Bidiagonalisation(
            deflated,
            seed=seed,
            start=self._outside(self.done) if self._left_over_is_zero else None,
            within=(deflated.keep_right, deflated.keep_left),
            scale=scale,
        )

    def is_hopeless(self) -> bool:
        """Whether even the lower bound of what is left over is too large to prove anything by it."""
        if not self.now.alpha or self._values[-1] == 0:
            return False
        allowed = self._values * (1 + self.tol)
        feasible = _EPSILONS[(self._bounds <= allowed).all(1)]
        if not self.done:
            return float(self.now.ritz_values()[0]) > allowed[-1]
        rest = self.now.largest
        return not len(feasible) or rest**2 + min(self._gain, rest) ** 2 / feasible[-1] > allowed[-1] ** 2

    def is_settled(self) -> bool:
        """Whether the k values would be good enough were 0.9 σ_k the most that a new start could find."""
        bound = 1 + min(self.tol, SETTLED) / 2
        gain = self.now.alpha[-1] / self._values[-1]  # about what J₂ will have on v_{k+1}
        epsilon = gain**2 / (bound**2 - LEFT_OVER**2)
        matrix, coupling = self._projected([*self.done, self.now])
        bounds = _bounds(matrix, coupling, epsilon, self.k)
        return bool((bounds <= bound * self._values).all())

    def error(self) -> float:
        """The largest relative error."""
        return float(self.errors().max())

    def errors(self) -> np.ndarray:
        """Relative errors (k,) of the values in hand."""
        values = self._values
        upper = values if self.is_exhausted else np.maximum(self._upper(), values)
        relative = np.divide(upper - values, values, out=np.full(self.k, inf), where=values > 0)
        floor = np.divide(self.floor, values, out=np.full(self.k, inf), where=values > 0)
        errors = relative + floor
        return np.where(values > self.floor, errors, 0.0 if self.is_exhausted else inf)

    @property
    def floor(self) -> float:
        """What is round-off beside the largest value: of a sum, and of what ends a process."""
        size = sum(len(process.alpha) for process in (*self.done, self.now))
        units = max(8 * size, 10 * sqrt(self.op.shape[1]) if self.is_exhausted else 0)
        return units * round_off_of(self.op) * float(self._values[0])

    def _upper(self) -> np.ndarray:
        """Upper bounds (k,) of the k largest; where nothing is done, all that is known is ‖J‖."""
        if not self.now.alpha:
            return np.full(self.k, inf)
        rest = float(self.now.ritz_values()[0])
        if not self.done and rest > self._values[-1] * (1 + self.tol):
            return np.full(self.k, inf)
        rest = self.now.largest * (1 + self.now.error(self.confidence))
        if not self.done:
            return np.full(self.k, rest)
        floors = np.sqrt(rest**2 + min(self._gain, rest) ** 2 / _EPSILONS)
        return np.maximum(self._bounds, floors[:, None]).min(0)

    def result(self, status: Status) -> TopSingular:
        """The values and vectors in hand."""
        processes = [*self.done, self.now]
        left, _, right = np.linalg.svd(self._projected(processes)[0], full_matrices=False)
        errors = self.errors()
        return TopSingular(
            values=np.where(self._values > self.floor, self._values, 0.0),
            errors=errors,
            round_off=self.floor,
            products=self.products,
            starts=len(processes),
            status=status,
            left=combine(torch.cat([process.left for process in processes]), left[:, : self.k]).T,
            right=combine(torch.cat([_right(process) for process in processes]), right[: self.k].T).T,
        )

    def _projected(self, processes: list[Bidiagonalisation]) -> tuple[np.ndarray, np.ndarray]:
        """M = UᵀJV of some processes, and L with LLᵀ = RRᵀ, without a product.

        A process that could go on is coupled by β_k u_k v_{k+1}ᵀ alone, and v_{k+1} lies partly in the bases
        of later processes (an entry of M), partly outside of all (an entry of R).
        """
        blocks = [_square(process) for process in processes]
        rows = np.cumsum([0, *(len(block) for block in blocks)])
        columns = np.cumsum([0, *(block.shape[1] for block in blocks)])
        matrix = np.zeros((rows[-1], columns[-1]))
        for p, block in enumerate(blocks):
            matrix[rows[p] : rows[p + 1], columns[p] : columns[p + 1]] = block
        outside, at = [], []
        for p, (inside, rest) in _followers(processes).items():
            matrix[rows[p + 1] - 1, columns[p + 1] :] = inside
            outside.append(rest)
            at.append(rows[p + 1] - 1)
        coupling = np.zeros((rows[-1], len(at)))
        if at:  # R = LQ: L has the same RRᵀ, and squares nothing
            coupling[at] = torch.linalg.qr(torch.stack(outside, 1), mode="r").R.T.cpu().numpy()
        return matrix, coupling

    def _outside_gain(self) -> float:
        """‖J₂Q‖ for an orthonormal basis Q of the row space of R, from the images that are known."""
        if not self._images:
            return 0.0
        outside = torch.stack([rest for _, rest in _followers(self.done).values()], 1)
        left = torch.cat([process.left for process in self.done]).double()
        images = torch.stack(self._images, 1)
        for _ in range(2):
            images = images - left.T @ (left @ images)
        factor = torch.linalg.qr(outside, mode="r").R
        if float(factor.diagonal().abs().min()) < 1e-6 * float(factor.norm()):
            return inf  # two processes go on the same way
        return float(torch.linalg.solve_triangular(factor, images, upper=True, left=False).norm())

    @staticmethod
    def _outside(processes: list[Bidiagonalisation]) -> Tensor:
        """The largest row [n] of R."""
        return max((rest for _, rest in _followers(processes).values()), key=lambda rest: float(rest.norm()))


def _followers(processes: list[Bidiagonalisation]) -> dict[int, tuple[np.ndarray, Tensor]]:
    """β_k v_{k+1} of each process that could go on: its coordinates in the bases of later processes, and what
    of it is outside of all."""
    followers = {}
    for p, process in enumerate(processes):
        if process.exhausted or not process.alpha:
            continue
        rest = process.beta[-1] * process.right[-1].double()
        inside = [np.zeros(0)]
        for later in processes[p + 1 :]:
            basis = _right(later).double()
            weights = basis @ rest
            rest = rest - weights @ basis
            inside.append(weights.cpu().numpy())
        followers[p] = (np.concatenate(inside), rest)
    return followers


def _onto(rows: Tensor) -> Projector:
    """The projector onto orthonormal rows, in float64: what is left over is small, and found again."""
    exact = rows.double()
    return lambda v: ((v.double() @ exact.T) @ exact).to(v.dtype)


def _right(process: Bidiagonalisation) -> Tensor:
    """V as rows, without v_{k+1}."""
    return process.right if process.exhausted else process.right[: len(process.alpha)]


def _square(process: Bidiagonalisation) -> np.ndarray:
    """B, or B̂ where the space is exhausted."""
    matrix = process.bidiagonal()
    return matrix[:, : len(_right(process))]


def _bounds(matrix: np.ndarray, coupling: np.ndarray, epsilon: float, k: int) -> np.ndarray:
    """Roots of the k largest eigenvalues of MMᵀ + (1 + ε) LLᵀ."""
    wide = np.concatenate((matrix, sqrt(1 + epsilon) * coupling), 1)
    return _first(np.linalg.svd(wide, compute_uv=False), k)


def _first(values: np.ndarray, k: int) -> np.ndarray:
    """The first k, zeros after the last."""
    return np.pad(values[:k], (0, max(0, k - len(values))))
