"""The inverse of a stack J = J_L … J_1 from solves with its layers, each far better conditioned than J.

    J⁻¹u = J_1⁻¹ (J_2⁻¹ (… J_L⁻¹ u)).

Golub–Kahan–Lanczos on J needs about κ(J) products to see σ_min; on J⁻¹ it needs as few as for any σ_max, and
each of its products costs what the solves cost: a few products with each layer, as a Pre-LN layer is I + A.

Layers with kernels (Post-LN: N′(I + A) with the left kernel of N′ known in closed form). Pseudo-inverses do
not multiply in general; they do for full-rank factors: (BC)⁺ = C⁺B⁺ for B of full column rank and C of full
row rank. So with P_l the projector onto range(J_l), each layer but the first is inverted *between* ranges,

    J⁺ = J_1⁺ (P_2 J_2 P_1)⁺ … (P_L J_L P_{L−1})⁺,

which is right if and only if no layer loses what the layers before it pass on:

    rank J_1 = … = rank J_L =: r,  and  range(J_l) ∩ kernel(J_{l+1}) = {0}  for every l.

The ranks are compared at the start. The second holds where (P_{l+1} J_{l+1} P_l) x = u has a solution for a
random u in range(J_{l+1}), which is seen in every solve: its residual stays above its tolerance otherwise.

Cost: one product with one of L layers counts 1/L of a product with J.

Sources: Ben-Israel & Greville, "Generalized inverses" (full-rank factors); Simoncini & Szyld 2003 (inexact
Krylov methods); Saad & Schultz 1986.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, nan, sqrt

import numpy as np
import torch
from torch import Tensor

from normscope.linalg.golub_kahan import (
    CONFIDENCE,
    Bidiagonalisation,
    LinearMap,
    Status,
    check_budget,
    round_off_of,
)
from normscope.linalg.maps import BaseMap, Deflated, Transposed
from normscope.linalg.smallest import LEAK_MARGIN, Side, SigmaMin
from normscope.linalg.solve import Solver
from normscope.linalg.subspaces import Kernel, dimension

SOLVE_SHARE = 0.1
"""Tolerance of the solves, as a share of that of σ_min."""

PROCESS_SHARES = (0.6, 0.3)
"""What Golub–Kahan–Lanczos may leave of the tolerance, first and where that was not enough; the rest is for
the solves."""

FIRST_SHARE = 0.1
"""What the first J⁺u may be off, as a share of the tolerance; the solves are made as tight as that takes.
Errors of many layers and of many products add up, and to start again later costs the whole iteration."""

LOOSE = 1e-2
"""Tolerance of the solves that only estimate an error: a layer's nearly lost direction is a small part of a
random vector, a larger one of what a solve has left over, and has to be found there."""


@dataclass(frozen=True)
class Layer:
    """One factor of a stack, with the kernels that are known.

    Attributes:
        map: J_l [m, n].
        left_kernel: {u : J_lᵀu = 0}, all of it: an orthonormal basis (m, r), or the projector onto it.
        kernel: {v : J_l v = 0}, all of it; needed of the first layer only, where it makes the solves cheaper.
    """

    map: LinearMap
    left_kernel: Kernel | None = None
    kernel: Kernel | None = None


class LayerwiseInverse(BaseMap):
    """J⁺ [n, m] of J = layers[-1] … layers[0], the first layer first.

    A product costs a solve with each layer: some products of J, fewer as the solves learn.

    Args:
        layers: maps, or `Layer`s where kernels are known.
        tol: relative residual of every solve.
        max_products: budget of each solve with one layer.
        budget: of all together, in product-equivalents of J.

    Attributes:
        shape: (n, m), of J⁺.
        cost: product-equivalents of J spent: a product with one of L layers counts 1/L.
        worst: the largest relative residual of a solve that should have had none.
        first_error: relative error of the first J⁺u, as `error_of` estimates it; None before that.
        is_spent: whether a solve was cut short by `budget`.
        leak: the largest gain that was found along what was called a left kernel, relative to the layer's.
        carried: what those gains came to behind all layers, relative to u, in the latest J⁺u of `error_of`.
        first_carried: the same of the first J⁺u.
        gain: length behind all layers of what the first leaks of a random vector [n]: all that J does to what
            the first layer takes to zero but for its leak. None before it is measured.
        obstacle: why the product of inverses is not J⁺, else empty.

    Raises:
        ValueError: no layers; shapes that do not meet; kernels that are not orthonormal.

    Example:
        >>> from normscope.linalg.maps import Matrix
        >>> layers = [Matrix(torch.diag(torch.tensor(values))) for values in ([2.0, 1.0], [1.0, 4.0])]
        >>> LayerwiseInverse(layers).matvec(torch.tensor([2.0, 4.0]))
        tensor([1.0000, 1.0000])
    """

    def __init__(
        self,
        layers: Sequence[LinearMap | Layer],
        *,
        tol: float = 1e-6,
        max_products: int = 1000,
        budget: float = inf,
    ) -> None:
        self.layers = [each if isinstance(each, Layer) else Layer(each) for each in layers]
        _require_meeting(self.layers)
        first, last = self.layers[0].map, self.layers[-1].map
        super().__init__((first.shape[1], last.shape[0]), first.dtype, first.device)
        self.tol = tol
        self.max_products = max_products
        self.cost, self.budget, self.is_spent = 0.0, budget, False
        self.worst = self.leak = self.carried = self.first_carried = 0.0
        self.first_error: float | None = None
        self.gain: float | None = None
        self.obstacle = _ranks_differ(self.layers)
        self.between = [self._between(index) for index in range(len(self.layers))]
        self._solvers = [
            Solver(each, by_residual=index > 0 or not self._is_open_ended, domain=each.keep_right)
            for index, each in enumerate(self.between)
        ]
        self._adjoints = [
            Solver(Transposed(each), by_residual=True, domain=each.keep_left) for each in self.between
        ]

    @property
    def blocked(self) -> bool:
        """Whether this is not J⁺: pseudo-inverses do not multiply, a solve has not come to its tolerance, or
        the budget is spent."""
        return bool(self.obstacle) or self.worst > self.tol or self.is_spent

    @property
    def round_off(self) -> float:
        """Relative error of a product, as far as it was seen: that of the solves; inf where `blocked`."""
        if self.blocked:
            return inf
        return max(torch.finfo(self.dtype).eps, self.tol, self.worst, self.first_error or 0.0)

    @property
    def _is_open_ended(self) -> bool:
        """Whether the first layer has a right kernel that is not known: solutions are of least norm then."""
        first = self.layers[0]
        return first.kernel is None and (
            first.left_kernel is not None or first.map.shape[0] < first.map.shape[1]
        )

    def tighten(self, factor: float) -> None:
        """Solve so many times as well from now on, and forget how well it was before."""
        self.tol /= factor
        self.worst, self.first_error = 0.0, None

    def error_of(self, u: Tensor) -> tuple[Tensor, float]:
        """x ≈ J⁺u, and ‖x − J⁺u‖/‖x‖ estimated.

        What each solve has left over is computed anew from the layers, and carried through the inverse of the
        layers before it. What a layer leaves in its left kernel is carried through the layers after it, to
        `carried`. Costs one product of J (two where left kernels are named) and one application with loose
        solves more. The estimate is inf where the budget is spent.
        """
        passed = [self.between[-1].keep_left(u)]
        for index in reversed(range(len(self.layers))):
            passed.append(self._solve(index, passed[-1], self.tol))
        passed.reverse()
        error = torch.zeros_like(u)
        leaks = []
        for index in reversed(range(len(self.layers))):
            image, leak = self._image(index, passed[index])
            leaks.append(leak)
            error = self._solve(index, error + passed[index + 1] - image, LOOSE, required=False)
        self.carried = self._behind(leaks[::-1]) / max(float(passed[-1].double().norm()), 1e-300)
        length = float(passed[0].double().norm())
        known = length and not self.is_spent
        return passed[0], (1 + LOOSE) ** 2 * float(error.double().norm()) / length if known else inf

    def measure_gain(self, seed: int = 0) -> None:
        """Set `gain`, once. Costs one product of J; none where no left kernel is named, or the first layer's
        own kernel is."""
        first = self.layers[0]
        if self.gain is not None or first.left_kernel is None or first.kernel is not None:
            return
        generator = torch.Generator().manual_seed(seed + 1)
        x = torch.randn(self.shape[0], generator=generator, dtype=torch.float64).to(self.device, self.dtype)
        _, leak = self._image(0, x)
        self.gain = self._behind([leak] + [None] * (len(self.layers) - 1))

    def _behind(self, leaks: list[Tensor | None]) -> float:
        """Length behind the last layer of what the layers leave in their left kernels."""
        carried: Tensor | None = None
        for index, leak in enumerate(leaks):
            after = None if carried is None else self._through(index, carried)
            carried = leak if after is None else after if leak is None else leak + after
        return 0.0 if carried is None else float(carried.double().norm())

    def _forward(self, rows: Tensor) -> Tensor:
        return torch.stack([self._inverse(row) for row in rows])

    def _backward(self, rows: Tensor) -> Tensor:
        return torch.stack([self._inverse_transposed(row) for row in rows])

    def _inverse(self, u: Tensor) -> Tensor:
        if self.first_error is None:  # measured once, before there is much to remember
            x, self.first_error = self.error_of(u)
            self.first_carried = max(self.first_carried, self.carried)
            return x
        u = self.between[-1].keep_left(u)
        for index in reversed(range(len(self.layers))):
            u = self._solve(index, u, self.tol)
        return u

    def _inverse_transposed(self, v: Tensor) -> Tensor:
        v = self.between[0].keep_right(v)
        for index in range(len(self.layers)):
            v = self._solve(index, v, self.tol, adjoint=True)
        return v

    def _solve(
        self, index: int, b: Tensor, tol: float, *, adjoint: bool = False, required: bool = True
    ) -> Tensor:
        solver = (self._adjoints if adjoint else self._solvers)[index]
        # Jᵀ of the first layer may have a right side outside its range: then the least residual is meant.
        may_be_outside = adjoint and index == 0 and self._is_open_ended
        least_tol = tol if may_be_outside else 0.0
        left = max(0.0, self.budget - self.cost) * len(self.layers)
        allowed = int(min(self.max_products, left))
        found = solver.solve(b, tol=tol, least_tol=least_tol, max_products=allowed)
        self.cost += found.products / len(self.layers)
        if allowed < self.max_products and found.residual > tol and not found.least:
            self.is_spent = True
            return found.x
        free = may_be_outside and found.least
        if required and not free:
            self.worst = max(self.worst, found.residual)
        return found.x

    def _image(self, index: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """P_l J_l x, and what J_l leaves outside of P_l."""
        whole = self._through(index, x)
        if self.layers[index].left_kernel is None:
            return whole, None
        image = self.between[index].keep_left(whole)
        size = float(whole.double().norm())
        if size:
            self.leak = max(self.leak, float((whole - image).double().norm()) / size)
        return image, whole - image

    def _through(self, index: int, x: Tensor) -> Tensor:
        """J_l x; zero where the budget is spent."""
        if (self.budget - self.cost) * len(self.layers) < 1 - 1e-6:
            self.is_spent = True
            return torch.zeros(self.layers[index].map.shape[0], dtype=self.dtype, device=self.device)
        self.cost += 1 / len(self.layers)
        return self.layers[index].map.matvec(x)

    def _between(self, index: int) -> Deflated:
        layer = self.layers[index]
        before = self.layers[index - 1].left_kernel if index else layer.kernel
        return Deflated(layer.map, kernel=before, left_kernel=layer.left_kernel)


def layerwise_sigma_min(
    layers: Sequence[LinearMap | Layer],
    *,
    tol: float = 5e-2,
    max_products: float = 400.0,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> SigmaMin:
    """The smallest non-zero singular value of J = layers[-1] … layers[0], as 1/σ_max(J⁺).

    Costs some tens to a few hundred products of J, whatever its κ: one with one of L layers counts 1/L.

    Args:
        layers: maps, or `Layer`s where kernels are known; the first layer first.
        tol: relative error to stop at.
        max_products: budget in products of the whole J; a solve that would go beyond is cut short.
        seed: of the random start.
        confidence: as for `sigma_max`.

    Returns:
        The value with error and status, as of `sigma_min`. The error is that of Golub–Kahan–Lanczos on J⁺ and
        that of the solves, which is measured at the last vector; and what leaks into a named left kernel, as
        it comes out of the whole stack beside σ. NOT_CONVERGED where a solve has not come to
        its tolerance, and where pseudo-inverses do not multiply; `note` says it.

    Raises:
        ValueError: as `LayerwiseInverse`; a budget under 2; a confidence outside (0, 1).
        FloatingPointError: where a product is not finite.

    Example:
        >>> from normscope.linalg.maps import Matrix
        >>> layers = [Matrix(torch.diag(torch.tensor([1.0, 0.1 * k]))) for k in (1, 2, 3)]
        >>> round(layerwise_sigma_min(layers).value, 5)
        0.006
    """
    check_budget(max_products, confidence)
    inverse = LayerwiseInverse(layers, tol=SOLVE_SHARE * min(tol, 5e-2), budget=max_products)
    _started(inverse, seed).half_step()
    if (by := _excess(inverse, tol)) > 1:
        inverse.tighten(by)
        seed += 1  # the error is to be measured at what is not remembered
    while True:
        process = _started(inverse, seed)
        for share in PROCESS_SHARES:
            _iterate(inverse, process, share * tol, confidence)
            found = _result(inverse, process, confidence, tol)
            if found.status is Status.CONVERGED or inverse.blocked:
                return found
            if found.value and _leaking(inverse, found.value) > (1 - PROCESS_SHARES[-1]) * tol:
                return found  # tighter solves do not help
        if inverse.tol < 100 * torch.finfo(inverse.dtype).eps:
            return found
        inverse.tighten(4)  # the solves are what is left; what they have learnt is kept
        seed += 1


def _started(inverse: LayerwiseInverse, seed: int) -> Bidiagonalisation:
    within = (inverse.between[-1].keep_left, inverse.between[0].keep_right)
    return Bidiagonalisation(inverse, seed=seed, within=within)


def _excess(inverse: LayerwiseInverse, tol: float) -> float:
    """How many times too large the error of the first product was, as far as the precision allows."""
    most = inverse.tol / (100 * torch.finfo(inverse.dtype).eps)
    return min((inverse.first_error or 0.0) / (FIRST_SHARE * tol), most)


def _iterate(inverse: LayerwiseInverse, process: Bidiagonalisation, tol: float, confidence: float) -> None:
    while not process.alpha or process.error(confidence) > tol:
        if inverse.blocked or process.exhausted:
            return
        process.step()


def _result(inverse: LayerwiseInverse, process: Bidiagonalisation, confidence: float, tol: float) -> SigmaMin:
    side = _side(inverse.layers)
    if not process.alpha:
        n, m = inverse.shape
        empty = (torch.zeros(size, dtype=inverse.dtype, device=inverse.device) for size in (m, n))
        note = _note(inverse) or "nothing of a random vector comes through"
        return SigmaMin(
            0.0, inf, inf, inverse.cost, Status.NOT_CONVERGED, side, inverse.leak, nan, note, *empty
        )
    largest, residual, right, left = process.triple(0)
    preimage, solve_error = right, inf
    if not inverse.is_spent:
        preimage, solve_error = inverse.error_of(left)
        inverse.measure_gain()
    if inverse.is_spent:  # before, or by that
        preimage = largest * right
    length = float(preimage.double().norm())
    solve_error = max(solve_error, inverse.first_error or 0.0, inverse.worst)
    slack = solve_error * sqrt(2) * float(np.linalg.norm(process.bidiagonal())) / largest
    slack += _leaking(inverse, 1 / length)
    error = _total(length, process.largest * (1 + process.error(confidence)), slack, inverse)
    error = inf if inverse.blocked else error
    return SigmaMin(
        value=1 / length,
        error=error,
        residual=residual,
        products=inverse.cost,
        status=Status.CONVERGED if error <= tol else Status.NOT_CONVERGED,
        deflated=side,
        kernel_gain=inverse.leak,
        largest=nan,
        note=_note(inverse),
        left=left,
        right=preimage / length,
    )


def _leaking(inverse: LayerwiseInverse, sigma: float) -> float:
    """Relative change of σ_min by D, what the layers leave in what was called their left kernels.

    From below σ(1 − ‖DJ⁺‖), from above √(σ²(1 + ‖DJ⁺‖)² + ‖D restricted to J's kernel‖²), by min–max. The
    first J⁺u was of a random u, which shows at least 1/LEAK_MARGIN of ‖DJ⁺‖/√m but for one time in ten; the
    last is of the vector where J⁺ is largest. `inverse.gain` is of a random vector, too.
    """
    relative = max(LEAK_MARGIN * sqrt(inverse.shape[1]) * inverse.first_carried, inverse.carried)
    return relative + hypot(1.0, LEAK_MARGIN * (inverse.gain or 0.0) / sigma) - 1


def _total(length: float, upper: float, slack: float, inverse: LayerwiseInverse) -> float:
    """Relative error of 1/length, where ‖J⁺‖ is between `length` and `upper` up to a share `slack`."""
    slack += 8 * sum(round_off_of(layer.map) for layer in inverse.layers)
    if not slack < 1:
        return inf
    return max(1 - length / (upper + slack * length), 1 / (1 - slack) - 1)


def _note(inverse: LayerwiseInverse) -> str:
    if inverse.obstacle:
        return inverse.obstacle
    if inverse.is_spent:
        return f"the budget of {inverse.budget:g} products is spent"
    if inverse.blocked:
        return (
            f"a solve has {inverse.worst:.1g} of its right side left over: a layer has a kernel that was not "
            "named, or loses what the layers before it pass on"
        )
    return f"what was called a left kernel has a gain of {inverse.leak:.2g}" if inverse.leak > 1e-6 else ""


def _require_meeting(layers: Sequence[Layer]) -> None:
    if not layers:
        raise ValueError("no layers: expected at least one")
    for inner, outer in pairwise(layers):
        if outer.map.shape[1] != inner.map.shape[0]:
            raise ValueError(
                f"a layer of shape {outer.map.shape} after one of shape {inner.map.shape}: expected "
                f"{inner.map.shape[0]} columns"
            )


def _ranks_differ(layers: Sequence[Layer]) -> str:
    """In which layers the ranks, as the kernels tell them, are not the same; empty where they are."""
    ranks = []
    for number, layer in enumerate(layers, 1):
        (m, n), like = layer.map.shape, (layer.map.dtype, layer.map.device)
        rank = m - dimension(layer.left_kernel, m, *like)
        if rank > n or (layer.kernel is not None and rank != n - dimension(layer.kernel, n, *like)):
            return f"layer {number} of shape {(m, n)} has not the rank {rank} that its left kernel leaves it"
        ranks.append(rank)
    if len(set(ranks)) > 1:
        other = next(index for index, rank in enumerate(ranks) if rank != ranks[0])
        return (
            f"layer {other + 1} has rank {ranks[other]}, the first {ranks[0]}: pseudo-inverses do not "
            "multiply (join layers until the ranks are the same)"
        )
    return ""


def _side(layers: Sequence[Layer]) -> Side:
    left = any(layer.left_kernel is not None for layer in layers)
    right = layers[0].kernel is not None
    if left and right:
        return Side.BOTH
    return Side.LEFT if left else Side.RIGHT if right else Side.NONE
