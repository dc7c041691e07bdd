"""Closed form of the L2-norm y = z/s, s = max(‖z‖, ε), as of queries and keys: matrix, spectrum, kernel.

    J = (1/s)(I − ŷŷᵀ) where ‖z‖ ≥ ε, ŷ = z/‖z‖;  I/ε where ‖z‖ < ε

Shapes: d features last; leading axes (…) are tokens. Source: the quotient rule; every function here is held
against autograd in the tests.
"""

import torch
from torch import Tensor


def l2_norm_jacobian(z: Tensor, *, eps: float = 1e-12) -> Tensor:
    """J (…, d, d) of y = z / max(‖z‖, ε), as `torch.nn.functional.normalize`, at z (…, d).

    (1/‖z‖)(I − ŷŷᵀ) with ŷ = z/‖z‖ where ‖z‖ ≥ ε, rank d − 1; I/ε, of full rank, below. nan at z = 0 with
    ε = 0, where there is no derivative. With ε inside the root, z/√(‖z‖² + ε), it is `rms_norm_jacobian(z, w,
    ε/d)` with w = d^(−1/2) throughout.

    Costs O(d²) a token, no product. Source: the quotient rule.

    Args:
        z: what goes into the norm (…, d): a query or a key, mostly.
        eps: ε, the least length that is divided by.

    Example:
        >>> l2_norm_jacobian(torch.tensor([0.0, 2.0]))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
    """
    unit, length, above = _unit_of(z, eps)
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    along = torch.where(above, unit, 0.0)
    return (eye - along.unsqueeze(-1) * along.unsqueeze(-2)) / length.unsqueeze(-1)


def l2_norm_singular_values(z: Tensor, *, eps: float = 1e-12) -> Tensor:
    """Singular values (…, d), descending, of `l2_norm_jacobian`: 1/‖z‖ and one 0; all 1/ε where ‖z‖ < ε.

    Costs O(d) a token, no product. Source: I − ŷŷᵀ is a projector.

    Args:
        z: what goes into the norm (…, d).
        eps: ε.

    Example:
        >>> l2_norm_singular_values(torch.tensor([3.0, 4.0]))
        tensor([0.2000, 0.0000])
    """
    _, length, above = _unit_of(z, eps)
    values = (1 / length).expand(z.shape).clone()
    values[..., -1:] = torch.where(above, 0.0, values[..., -1:])
    return values


def l2_norm_kernel(z: Tensor, *, eps: float = 1e-12) -> Tensor:
    """Orthonormal basis (…, d, 1) of the kernel of `l2_norm_jacobian`, right and left: it is symmetric.

    span{z}; a column of zeros where ‖z‖ < ε and nothing is lost.

    Costs O(d) a token, no product. Source: by hand, from the Jacobian.

    Args:
        z: what goes into the norm (…, d).
        eps: ε.

    Example:
        >>> l2_norm_kernel(torch.tensor([3.0, 4.0])).squeeze(-1)
        tensor([0.6000, 0.8000])
    """
    unit, _, above = _unit_of(z, eps)
    return torch.where(above, unit, 0.0).unsqueeze(-1)


def _unit_of(z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """z/s, s = max(‖z‖, ε) (…, 1), and where ‖z‖ ≥ ε (…, 1); the length neither over- nor underflows."""
    scale = z.abs().amax(-1, keepdim=True)
    norm = scale * (z / torch.where(scale > 0, scale, 1.0)).norm(dim=-1, keepdim=True)
    length = norm.clamp_min(eps)
    return z / length, length, norm >= eps
