"""Inverse of a stack J = J_L … J_1 from solves with its layers, each far better conditioned than J.

    J⁻¹u = J_1⁻¹ (J_2⁻¹ (… J_L⁻¹ u)).

Golub–Kahan–Lanczos on J needs about κ(J) products for σ_min. On J⁻¹ it needs as few as for any σ_max. Each of
its products costs the solves: a few products with each layer, because a Pre-LN layer is I + A.

In Post-LN, layers N′(I + A) have kernels, and the left kernel of N′ is known in closed form. Pseudo-inverses
do not multiply in general; they do for full-rank factors: (BC)⁺ = C⁺B⁺ for B of full column rank and C of
full row rank. So with P_l the projector onto range(J_l), each layer but the first is inverted *between*
ranges,

    J⁺ = J_1⁺ (P_2 J_2 P_1)⁺ … (P_L J_L P_{L−1})⁺,

which holds if and only if no layer maps a vector of the previous range to zero:

    rank J_1 = … = rank J_L =: r,  and  range(J_l) ∩ kernel(J_{l+1}) = {0}  for every l.

The ranks are compared at the start. The second condition holds where (P_{l+1} J_{l+1} P_l) x = u has a
solution for a random u in range(J_{l+1}); otherwise the residual of the solve stays above its tolerance.

Cost: a product with one of L layers counts as 1/L of a product with J.

Sources: Ben-Israel & Greville, "Generalized inverses" (full-rank factors); Simoncini & Szyld 2003 (inexact
Krylov methods); Saad & Schultz 1986.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from normscope.linalg.golub_kahan import LinearMap
from normscope.linalg.maps import BaseMap, Deflated, Transposed
from normscope.linalg.solve import Solver
from normscope.linalg.subspaces import Kernel, dimension

LOOSE = 1e-2
"""Tolerance of the solves that only estimate an error. A nearly lost direction of a layer is a small part of
a random vector but a larger part of a solve's residual, so it must be resolved there.
"""


@dataclass(frozen=True)
class Layer:
    """One factor of a stack, with its known kernels.

    Attributes:
        map: J_l [m, n].
        left_kernel: the whole {u : J_lᵀu = 0}: an orthonormal basis (m, r), or the projector onto it.
        kernel: the whole {v : J_l v = 0}; only the first layer's is used, to make solves cheaper.
    """

    map: LinearMap
    left_kernel: Kernel | None = None
    kernel: Kernel | None = None


class LayerwiseInverse(BaseMap):
    """J⁺ [n, m] of J = layers[-1] … layers[0], the first layer first.

    A product costs a solve with each layer: some products of J, fewer as the solves recycle directions.

    Args:
        layers: maps, or `Layer`s where kernels are known.
        tol: relative residual of every solve.
        max_products: budget of each solve with one layer.
        budget: of all together, in product-equivalents of J.

    Attributes:
        shape: (n, m), of J⁺.
        cost: product-equivalents of J spent.
        worst: the largest relative residual of a solve whose exact residual is zero.
        first_error: relative error of the first J⁺u, as `error_of` estimates it; None before that.
        is_spent: whether a solve was cut short by `budget`.
        leak: the largest gain found along a named left kernel, relative to the layer's.
        carried: those gains after all layers, relative to u, in the latest J⁺u of `error_of`.
        first_carried: the same for the first J⁺u.
        gain: length, after all layers, of the first layer's leak of a random vector [n]; None before it is
            measured.
        obstacle: why the product of inverses is not J⁺, else empty.

    Raises:
        ValueError: no layers; shapes that do not meet; kernels that are not orthonormal.

    Examples:
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
        before = [self.layers[0].kernel, *(layer.left_kernel for layer in self.layers)]
        self.between = [
            Deflated(layer.map, kernel=kernel, left_kernel=layer.left_kernel)
            for layer, kernel in zip(self.layers, before, strict=False)
        ]
        self._solvers = [
            Solver(each, by_residual=index > 0 or not self._is_open_ended, domain=each.keep_right)
            for index, each in enumerate(self.between)
        ]
        self._adjoints = [
            Solver(Transposed(each), by_residual=True, domain=each.keep_left) for each in self.between
        ]

    @property
    def blocked(self) -> bool:
        """Whether this is not J⁺: an obstacle, a solve above its tolerance, or a spent budget."""
        return bool(self.obstacle) or self.worst > self.tol or self.is_spent

    @property
    def round_off(self) -> float:
        """Observed relative error of a product, from the solves; inf where `blocked`."""
        if self.blocked:
            return inf
        return max(torch.finfo(self.dtype).eps, self.tol, self.worst, self.first_error or 0.0)

    @property
    def _is_open_ended(self) -> bool:
        """Whether the first layer has an unknown right kernel, so that solutions have least norm."""
        first = self.layers[0]
        return first.kernel is None and (
            first.left_kernel is not None or first.map.shape[0] < first.map.shape[1]
        )

    def tighten(self, factor: float) -> None:
        """Divide the solves' tolerance by `factor` from now on, and reset the observed errors."""
        self.tol /= factor
        self.worst, self.first_error = 0.0, None

    def error_of(self, u: Tensor) -> tuple[Tensor, float]:
        """x ≈ J⁺u, and an estimate of ‖x − J⁺u‖/‖x‖; inf where the budget is spent.

        The residual of each solve is recomputed from the layers, and carried through the inverse of the
        layers before it. The part of a layer's output in its left kernel is carried through the layers after
        it, to `carried`. Costs one product of J (two where left kernels are named) and another application
        with loose solves.
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
        """Set `gain`, once. Costs one product of J; none without named left kernels, or where the kernel of
        the first layer is named."""
        first = self.layers[0]
        if self.gain is not None or first.left_kernel is None or first.kernel is not None:
            return
        generator = torch.Generator().manual_seed(seed + 1)
        x = torch.randn(self.shape[0], generator=generator, dtype=torch.float64).to(self.device, self.dtype)
        _, leak = self._image(0, x)
        self.gain = self._behind([leak] + [None] * (len(self.layers) - 1))

    def _behind(self, leaks: list[Tensor | None]) -> float:
        """Length, after the last layer, of the parts that the layers leave in their left kernels."""
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
        if self.first_error is None:  # measured once, before the solves have many directions to recycle
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
        # Jᵀ of the first layer may have a right side outside its range: then the least residual is wanted.
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
        """P_l J_l x, and the part of J_l x outside of P_l."""
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
    """Message on the first layer whose rank, by its kernels, differs from the first layer's; else ""."""
    ranks = []
    for number, layer in enumerate(layers, 1):
        (m, n), like = layer.map.shape, (layer.map.dtype, layer.map.device)
        rank = m - dimension(layer.left_kernel, m, *like)
        if rank > n or (layer.kernel is not None and rank != n - dimension(layer.kernel, n, *like)):
            return (
                f"layer {number} of shape {(m, n)} cannot have the rank {rank} that its left kernel implies"
            )
        ranks.append(rank)
    if len(set(ranks)) > 1:
        other = next(index for index, rank in enumerate(ranks) if rank != ranks[0])
        return (
            f"layer {other + 1} has rank {ranks[other]}, the first {ranks[0]}: pseudo-inverses do not "
            "multiply (join layers until the ranks are the same)"
        )
    return ""
