"""Dense Jacobians of small maps, and ranks at a tolerance."""

from math import inf

import numpy as np
import torch
from torch import Tensor

from normscope.linalg.golub_kahan import LinearMap
from normscope.linalg.maps import Restriction, backward
from normscope.linalg.subspaces import unit_rows


def dense(op: LinearMap, *, chunk: int = 64) -> Tensor:
    """J [m, n] from its products with unit vectors. Costs one product Jᵀu a row, batched where it can be.

    Args:
        op: the map.
        chunk: products that run at once; memory grows with it.

    Raises:
        ValueError: chunk is under 1.
        TangentError: as the operator's products do.

    Examples:
        >>> dense(JacobianOperator(lambda x: x**2, torch.tensor([1.0, 2.0])))
        tensor([[2., 0.],
                [0., 4.]])
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: expected at least 1")
    rows = torch.arange(op.shape[0], device=op.device).split(chunk)
    return torch.cat([backward(op, unit_rows(some, op.shape[0], op.dtype)) for some in rows])


def restricted_jacobian(
    op: LinearMap, rows: Tensor | None = None, columns: Tensor | None = None, *, chunk: int = 64
) -> Tensor:
    """∂(some outputs)/∂(some inputs) [r, c] as a matrix, the other inputs fixed; one token's, for instance.

    The entries J_ij of the whole Jacobian are exact. Costs min(r, c) products of the whole map, batched: one
    Jᵀu a row, or one Jv a column where columns are fewer. Jᵀu needs no second derivative.

    Args:
        op: the map J [m, n].
        rows: indices of outputs (r,), default all; see `token_indices`.
        columns: indices of inputs (c,), default all.
        chunk: products that run at once; memory grows with it.

    Raises:
        ValueError: indices that the map does not have, or that occur twice; chunk under 1.
        TangentError: as the operator's products do.

    Examples:
        >>> J = Matrix(torch.arange(16.0).reshape(4, 4))
        >>> restricted_jacobian(J, token_indices(1, width=2), token_indices(0, width=2))
        tensor([[ 8.,  9.],
                [12., 13.]])
    """
    part = Restriction(op, rows=rows, columns=columns)
    if part.shape[1] < part.shape[0]:
        return dense(part.T, chunk=chunk).T
    return dense(part, chunk=chunk)


def singular_values(matrix: Tensor) -> np.ndarray:
    """Singular values (min(m, n),), descending, by a float64 SVD. Costs O(m n min(m, n)), no product.

    Errors are round-off, ε σ₁: smaller values are not distinguished from zero.

    Args:
        matrix: J [m, n].

    Examples:
        >>> singular_values(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        array([5., 0.])
    """
    return torch.linalg.svdvals(matrix.detach().cpu().double()).numpy()


def numerical_rank(singular_values: np.ndarray, tol: float) -> tuple[int, float]:
    """Rank at a relative tolerance, and the gap that justifies it. Costs no product.

    Args:
        singular_values: (k,), in any order.
        tol: values above tol · σ₁ count.

    Returns:
        rank r, and the gap σ_r / σ_{r+1}: large where the rank is clear, near 1 where the tolerance cuts
        through a continuum; inf for a full rank, for a zero map, and where σ_{r+1} is exactly zero.

    Raises:
        ValueError: singular values that are negative or not finite.

    Examples:
        >>> numerical_rank(np.array([4.0, 2.0, 0.25]), tol=0.1)
        (2, 8.0)
    """
    values = np.sort(np.asarray(singular_values, dtype=float))[::-1]
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError("singular values that are negative or not finite")
    if not len(values) or values[0] == 0:
        return 0, inf
    rank = int((values > tol * values[0]).sum())
    if rank in (0, len(values)) or values[rank] == 0:
        return rank, inf
    return rank, float(values[rank - 1] / values[rank])
