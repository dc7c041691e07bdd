"""Solve Mx = b repeatedly with one map: minimal residuals, recycled directions.

Directions p with orthonormal images c = Mp are kept from one right side to the next. The part of b in the
span of the images costs no product. For the rest the residual is the next direction (as in GMRES: one
product), or Mᵀr where that stagnates or M is not square (as in CGLS: two). Each solution minimises ‖b − Mx‖
over all kept directions. With Mᵀr alone x stays in the range of Mᵀ and is the solution of least norm.
Otherwise M must be injective.

Sources: Eisenstat, Elman & Schultz 1983 (GCR); de Sturler 1996 (recycling); Hestenes & Stiefel 1952 (CGLS).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.linalg.golub_kahan import LinearMap
from normscope.linalg.maps import Transposed
from normscope.linalg.subspaces import Projector

STAGNATION = 0.3
"""Share of the residual's square: after a direction that removes less, Mᵀr is the next direction."""


@dataclass(frozen=True)
class Solution:
    """x, and ‖b − Mx‖/‖b‖; `least` is True where Mᵀr is zero to its tolerance, so no x has a smaller one."""

    x: Tensor
    residual: float
    least: bool
    products: int


class Solver:
    """Solves Mx = b for one map M [m, n] and many b.

    Args:
        op: M.
        by_residual: whether residuals may be directions: M square and injective on `domain`.
        domain: projects directions onto the subspace of solutions; default the whole space.
        memory: bytes for directions and images; all are dropped when they need more.
    """

    _images: Tensor
    _directions: Tensor

    def __init__(
        self, op: LinearMap, *, by_residual: bool, domain: Projector | None = None, memory: int = 2**26
    ) -> None:
        self._domain = domain
        self.op, self.by_residual = op, by_residual and op.shape[0] == op.shape[1]
        self._adjoint = Transposed(op)
        self.memory = memory
        self._size = 0.0  # the largest gain seen, for ‖M‖
        self._forget()

    def solve(self, b: Tensor, *, tol: float, least_tol: float = 0.0, max_products: int = 200) -> Solution:
        """x with ‖b − Mx‖ ≤ tol·‖b‖, or ‖Mᵀr‖ ≤ least_tol·‖M‖·‖r‖ (at least round-off), or the best x within
        the budget."""
        scale = float(b.double().norm())
        x = torch.zeros(self.op.shape[1], dtype=b.dtype, device=b.device)
        if scale == 0:
            return Solution(x, 0.0, True, 0)
        r = b / scale
        if (self._images.nbytes + self._directions.nbytes) > self.memory:
            self._forget()
        if len(self._images):
            weights = self._images @ r
            x, r = weights @ self._directions, r - weights @ self._images
        products, by_residual, least = 0, self.by_residual, False
        round_off = 100 * torch.finfo(b.dtype).eps
        left = float(r.norm())
        while left > tol and products + 2 <= max_products and not least:
            if by_residual:
                direction = r / left if self._domain is None else self._domain(r / left)
            else:
                direction = self._adjoint.matvec(r / left)
                products += 1
                if float(direction.norm()) <= max(least_tol, round_off) * self._size:
                    least = True
                    break
            products += 1
            gained = self._append(direction)
            if gained:
                weight = torch.dot(self._images[-1], r)
                x, r = x + weight * self._directions[-1], r - weight * self._images[-1]
            now = float(r.norm())
            least = not gained and not by_residual
            by_residual = self.by_residual and now**2 <= (1 - STAGNATION) * left**2
            left = now
        return Solution(x * scale, left, least, products)

    def _append(self, direction: Tensor) -> bool:
        """Keep a direction and its image, made orthogonal to those before; False where nothing is new."""
        image = self.op.matvec(direction)
        before = float(image.norm())
        self._size = max(self._size, before / max(float(direction.norm()), 1e-300))
        for _ in range(2):
            weights = self._images @ image
            image = image - weights @ self._images
            direction = direction - weights @ self._directions
        norm = float(image.norm())
        if norm <= 100 * torch.finfo(image.dtype).eps * before:
            return False
        self._images = torch.cat((self._images, image.unsqueeze(0) / norm))
        self._directions = torch.cat((self._directions, direction.unsqueeze(0) / norm))
        return True

    def _forget(self) -> None:
        m, n = self.op.shape
        self._images = torch.zeros(0, m, dtype=self.op.dtype, device=self.op.device)
        self._directions = torch.zeros(0, n, dtype=self.op.dtype, device=self.op.device)
