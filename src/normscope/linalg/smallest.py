"""Smallest singular value outside the known kernels, by long Golub–Kahan–Lanczos.

The smallest Ritz value is an upper bound of σ_min. The lower bound is found like the upper one of
`sigma_max`: a random start in n dimensions has the mass ω ≥ δ²/n on σ_min², and the mass at λ is at most 1/Σ
p̂_j(λ)² (Christoffel), so σ_min² is at least the λ at which that sum reaches n/δ².

A known kernel is projected out of the start and of every later vector: projected out only once, it returns
through round-off, and the result is 1e-17. For stacks of layers with a large κ see `layerwise_sigma_min`.

Sources: Golub & Kahan 1965; Hochstenbach 2013, "Probabilistic upper bounds for the matrix two-norm".
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

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
from normscope.linalg.maps import Deflated, Transposed
from normscope.linalg.subspaces import Kernel, dimension

LEAK_MARGIN = 8  # a random vector of a kernel shows at least 1/8 of the kernel's gain, in nine cases of ten


class Side(StrEnum):
    """Kernels that were named and projected out."""

    NONE = "none"
    RIGHT = "right"
    LEFT = "left"
    BOTH = "right and left"


@dataclass(frozen=True)
class SigmaMin:
    """A smallest singular value with its error.

    Attributes:
        value: σ, an upper bound of σ_min of the deflated map up to round-off.
        error: upper estimate of the relative error (σ − σ_min)/σ; inf where nothing is known.
        residual: ‖Jᵀu − σv‖/σ of the vectors.
        products: Jv and Jᵀu spent; for a stack of layers, products of the whole.
        status: EXACT where the space was exhausted, CONVERGED where `error` ≤ tol.
        deflated: the kernels that were projected out.
        kernel_gain: gain of a random vector in those kernels; it should be round-off relative to σ.
        largest: the largest Ritz value, a lower bound of σ_max, for κ; nan where it is unknown.
        note: why it did not converge, or that a kernel leaks; else "".
        left, right: u [m] and v [n], of length 1.
    """

    value: float
    error: float
    residual: float
    products: float
    status: Status
    deflated: Side
    kernel_gain: float
    largest: float
    note: str
    left: Tensor = field(repr=False)
    right: Tensor = field(repr=False)


def sigma_min(
    op: LinearMap,
    *,
    kernel: Kernel | None = None,
    left_kernel: Kernel | None = None,
    tol: float = 5e-2,
    max_products: int = 400,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> SigmaMin:
    """The smallest singular value of `op` on the complement of its known kernels.

    Costs about 4·κ·ln(n) products to 5 %, with κ = σ_max/σ_min outside the kernels: the default budget is
    enough for κ up to about 20 at n = 200, 10 at n = 1000. For a larger κ the status is NOT_CONVERGED.

    Args:
        op: the map J [m, n]; the kernels' singular values are left out of its min(m, n).
        kernel: {v : Jv = 0}: an orthonormal basis (n, r), or the projector onto it (…, n) → (…, n).
        left_kernel: {u : Jᵀu = 0}, likewise. One side is enough.
        tol, max_products, confidence: as in `sigma_max`.
        seed: of the random start.

    Raises:
        ValueError: a kernel of another size, not orthonormal, or that leaves nothing; a budget under 2.
        FloatingPointError: where a product is not finite.

    Examples:
        >>> singular = Matrix(torch.diag(torch.tensor([3.0, 2.0, 0.0])))
        >>> found = sigma_min(singular, kernel=torch.tensor([[0.0], [0.0], [1.0]]))
        >>> round(found.value, 4), str(found.deflated), str(sigma_min(singular).status)
        (2.0, 'right', 'not converged')
    """
    check_budget(max_products, confidence)
    deflated, _ = without_kernels(op, kernel, left_kernel)
    gain, spent = kernel_gain(deflated, seed)
    process = Bidiagonalisation(deflated, seed=seed, within=(deflated.keep_right, deflated.keep_left))
    status, error = _iterate(process, tol, max_products - spent, confidence, gain)
    side = side_of(kernel is not None, left_kernel is not None)
    found = _result(process, status, error, spent, gain, side)
    return found if deflated.of is op else replace(found, left=found.right, right=found.left)


def without_kernels(op: LinearMap, kernel: Kernel | None, left_kernel: Kernel | None) -> tuple[Deflated, int]:
    """`op` without its kernels, or its transpose where that has fewer inputs; and the remaining dimension.

    Raises:
        ValueError: no dimension remains.
    """
    n = op.shape[1] - dimension(kernel, op.shape[1], op.dtype, op.device)
    m = op.shape[0] - dimension(left_kernel, op.shape[0], op.dtype, op.device)
    if min(m, n) < 1:
        raise ValueError(
            f"kernels that leave nothing of a map of shape {op.shape}: expected at least 1 dimension"
        )
    if m < n:
        op, kernel, left_kernel = Transposed(op), left_kernel, kernel
    return Deflated(op, kernel=kernel, left_kernel=left_kernel), min(m, n)


def _iterate(
    process: Bidiagonalisation, tol: float, max_products: int, confidence: float, gain: float
) -> tuple[Status, float]:
    while process.products + 2 <= max_products:
        process.step()
        error = _error(process, confidence, gain)
        if error <= tol or process.exhausted:
            done = Status.EXACT if process.exhausted else Status.CONVERGED
            return (done, error) if error <= tol else (Status.NOT_CONVERGED, inf)
    return Status.NOT_CONVERGED, _error(process, confidence, gain) if process.alpha else inf


def _error(process: Bidiagonalisation, confidence: float, gain: float) -> float:
    """Relative error: the bound's, plus round-off and the kernel's gain relative to σ."""
    if _is_singular(process):
        return inf  # J v = 0 for a v in the Krylov space
    values = process.ritz_values()
    smallest, condition = float(values[-1]), float(values[0] / values[-1]) if values[-1] > 0 else inf
    if condition == inf:
        return inf
    size = process.op.shape[1]
    eps = round_off_of(process.op)
    round_off = 8 * eps * condition * max(len(values), size**0.5 if process.exhausted else 0)
    squared = 0.0 if process.exhausted else 8 * torch.finfo(torch.float64).eps * condition**2  # λ = σ²
    return process.error_below(confidence) + round_off + squared + LEAK_MARGIN * gain / smallest


def kernel_gain(deflated: Deflated, seed: int) -> tuple[float, int]:
    """‖Jx‖ of a random x in the right kernel, or ‖Jᵀx‖ in the left one; and the products spent."""
    op, gains = deflated.of, [0.0]
    for size, keep, product in (
        (op.shape[1], deflated.keep_right, op.matvec),
        (op.shape[0], deflated.keep_left, op.rmatvec),
    ):
        generator = torch.Generator().manual_seed(seed + 1)
        whole = torch.randn(size, generator=generator, dtype=torch.float64).to(op.device, op.dtype)
        inside = whole - keep(whole)
        if bool(inside.any()):
            gains.append(float(product(inside).double().norm()))
    return max(gains), len(gains) - 1


def _is_singular(process: Bidiagonalisation) -> bool:
    """Whether the map is singular to working precision: J maps a v in the Krylov space to zero."""
    return not process.alpha or (process.exhausted and len(process.right) > len(process.alpha))


def _result(
    process: Bidiagonalisation, status: Status, error: float, spent: int, gain: float, side: Side
) -> SigmaMin:
    products = process.products + spent
    largest = float(process.ritz_values()[0]) if process.alpha else 0.0
    if _is_singular(process):
        left, right = (process.right.new_zeros(size) for size in process.op.shape)
        note = "" if products < 2 else "singular to working precision: name its kernel"
        return SigmaMin(0.0, inf, inf, products, status, side, gain, largest, note, left, right)
    value, residual, left, right = process.triple(-1)
    note = ""
    if gain * LEAK_MARGIN > 1e-2 * value:
        note = f"a named kernel has a gain of {gain:.2g}"
    elif status is Status.NOT_CONVERGED:
        note = f"σ_max/σ_min is {largest / value:.1g} or more" if value else "σ_min is round-off"
    return SigmaMin(value, error, residual, products, status, side, gain, largest, note, left, right)


def side_of(right: bool, left: bool) -> Side:
    """`Side` of the kernels that were given."""
    if right and left:
        return Side.BOTH
    return Side.RIGHT if right else Side.LEFT if left else Side.NONE
