"""Known kernels, given as an orthonormal basis or a projector: their projector and dimension.

The kernel of a map on T tokens of width d is mostly a product of one kernel per token. `TokenProjector` takes
the basis (T, d, r) that `left_kernel` and `right_kernel` of the closed forms return, at cost O(n·r) a vector.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Projector = Callable[[Tensor], Tensor]  # orthogonal projection of the last axis: (…, n) → (…, n)
Kernel = Tensor | Projector  # a subspace: an orthonormal basis (n, r), or the projector onto it


class TokenProjector:
    """Projector onto a product of one subspace per token; callable on (…, n), n = tokens · d.

    A projection costs O(n r), no product.

    Args:
        basis: (…, d, r), tokens first, orthonormal columns or columns of zeros.

    Attributes:
        dimension: of the whole subspace.

    Raises:
        ValueError: a basis without a token axis, or whose columns are not orthonormal.

    Examples:
        >>> basis = torch.tensor([[[1.0], [0.0]], [[0.0], [0.0]]])  # e₁ of the first of two tokens
        >>> project = TokenProjector(basis)
        >>> project(torch.ones(4)), project.dimension
        (tensor([1., 0., 0., 0.]), 1)
    """

    def __init__(self, basis: Tensor) -> None:
        if basis.dim() < 2:
            raise ValueError(f"a basis of shape {tuple(basis.shape)}: expected (…, d, r), tokens first")
        self.basis = basis.reshape(-1, *basis.shape[-2:])
        self.dimension = sum(_checked_dimension(each) for each in self.basis)

    def __call__(self, v: Tensor) -> Tensor:
        """(…, n) → (…, n)."""
        basis = self.basis = self.basis.to(v.device)
        basis = basis.to(v.dtype)
        tokens = v.reshape(*v.shape[:-1], *basis.shape[:2])
        weights = torch.einsum("...td,tdr->...tr", tokens, basis)
        return torch.einsum("...tr,tdr->...td", weights, basis).reshape(v.shape)


def projector(kernel: Kernel | None, size: int, dtype: torch.dtype, device: torch.device) -> Projector | None:
    """The projector of a basis (n, r), the callable itself, or None.

    Raises:
        ValueError: a basis of another size, or whose columns are not orthonormal.
    """
    if kernel is None or not isinstance(kernel, Tensor):
        return kernel
    if kernel.dim() != 2 or kernel.shape[0] != size:
        raise ValueError(f"a basis of shape {tuple(kernel.shape)}: expected ({size}, r)")
    _checked_dimension(kernel)
    basis = kernel.to(device, dtype)
    return lambda v: (v @ basis) @ basis.T


def dimension(kernel: Kernel | None, size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Dimension of a kernel. For a callable other than `TokenProjector`, the trace: n projections."""
    if kernel is None:
        return 0
    if isinstance(kernel, TokenProjector):
        return kernel.dimension
    if isinstance(kernel, Tensor):
        return _checked_dimension(kernel)
    trace = 0.0
    for some in torch.arange(size, device=device).split(256):
        units = unit_rows(some, size, dtype)
        trace += float(kernel(units).gather(1, some.unsqueeze(1)).double().sum())
    return round(trace)


def unit_rows(indices: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Unit vectors e_i [k, size] for `indices` (k,)."""
    rows = torch.zeros(len(indices), size, dtype=dtype, device=indices.device)
    rows[torch.arange(len(indices), device=indices.device), indices] = 1
    return rows


def _checked_dimension(basis: Tensor) -> int:
    """Number of non-zero columns of a basis (n, r); ValueError where those are not orthonormal."""
    gram = basis.T.double() @ basis.double()
    held = gram.diagonal().round().clamp(0, 1)
    off = float((gram - torch.diag(held)).abs().sum())
    if not off <= 1e3 * torch.finfo(basis.dtype).eps * max(1, basis.shape[1]):
        raise ValueError(f"a basis whose Gram matrix is off by {off:.1g}: expected orthonormal columns")
    return int(held.sum())
