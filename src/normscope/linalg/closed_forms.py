"""Closed forms of the LayerNorm and RMSNorm Jacobians: the matrix and its kernels.

    LayerNorm   y = γ ⊙ (z − μ)/s + β,  s = √(var + ε):   J = diag(γ) (1/s) (I − 11ᵀ/d − ẑẑᵀ/d)
    RMSNorm     y = γ ⊙ z/s + β,        s = √(ms + ε):    J = diag(γ) (1/s) (I − ẑẑᵀ/d)

with ẑ the normalised input before γ. The direction 1 is exactly null; ẑ keeps the gain ε/(var + ε)^{3/2},
null only while var ≫ ε. γ multiplies from the left: it changes the left kernel, not the right one. Gradients
pass through Jᵀ, so training loses the *left* kernel.

Shapes: d features last; leading axes (…) are tokens. Source: Xu et al. 2019 (arXiv 1911.07013) for the
backward; Zhang & Sennrich 2019 (arXiv 1910.07467) for RMSNorm; the kernels by hand, checked against autograd.
"""

import torch
from torch import Tensor

KERNEL_GAIN = 0.1
"""Largest gain along ẑ, as a share of the gain 1/s of other directions, at which ẑ counts as null."""


def layer_norm_jacobian(z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """J (…, d, d) of LayerNorm at z (…, d): diag(γ) (1/s) (I − 11ᵀ/d − ẑẑᵀ/d), s = √(var + ε).

    Costs O(d²) a token, no product.

    Args:
        z: input of the norm (…, d).
        weight: γ (d,), the whole factor (1 + weight for Gemma); None for ones.
        eps: ε.

    Examples:
        >>> layer_norm_jacobian(torch.tensor([1.0, -1.0]), None, 1.0)  # the rest: ε/s³, along ẑ
        tensor([[ 0.1768, -0.1768],
                [-0.1768,  0.1768]])
    """
    return _jacobian(z, weight, eps, centred=True)


def rms_norm_jacobian(z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """J (…, d, d) of RMSNorm at z (…, d): diag(γ) (1/s) (I − ẑẑᵀ/d), s = √(mean z² + ε).

    Costs O(d²) a token, no product.

    Args:
        z, weight, eps: as in `layer_norm_jacobian`.

    Examples:
        >>> rms_norm_jacobian(torch.tensor([1.0, -1.0]), None, 0.0)  # z itself is lost
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return _jacobian(z, weight, eps, centred=False)


def right_kernel(normalised: Tensor, centred: bool, tolerance: float = KERNEL_GAIN) -> Tensor:
    """Orthonormal basis (…, d, 2) of {v : Jv = 0}: span{1, ẑ} (LayerNorm) or span{ẑ} (RMSNorm), without γ.

    Zeros in γ widen the kernel beyond this. Columns are zero where a direction is not null. Costs O(d) a
    token, no product.

    Args:
        normalised, centred, tolerance: as in `left_kernel`.

    Examples:
        >>> z = torch.tensor([1.0, -1.0], dtype=torch.float64)
        >>> right_kernel(z, centred=True).abs()  # d = 2: nothing comes through a LayerNorm
        tensor([[0.7071, 0.7071],
                [0.7071, 0.7071]], dtype=torch.float64)
    """
    return left_kernel(normalised, None, centred, tolerance)[0]


def _jacobian(z: Tensor, weight: Tensor | None, eps: float, *, centred: bool) -> Tensor:
    d = z.shape[-1]
    middle = z - z.mean(-1, keepdim=True) if centred else z
    s = torch.sqrt(middle.square().mean(-1, keepdim=True) + eps)
    normalised = middle / s
    projected = (
        torch.eye(d, dtype=z.dtype, device=z.device) - normalised.unsqueeze(-1) * normalised.unsqueeze(-2) / d
    )
    projected = projected - 1 / d if centred else projected
    gamma = torch.ones(d, dtype=z.dtype, device=z.device) if weight is None else weight
    return gamma.unsqueeze(-1) * projected / s.unsqueeze(-1)


def left_kernel(
    normalised: Tensor, weight: Tensor | None, centred: bool, tolerance: float = KERNEL_GAIN
) -> tuple[Tensor, Tensor]:
    """Orthonormal basis of the left kernel {u : Jᵀu = 0} of a norm, token by token.

    Without zeros in γ this is γ⁻¹ ⊙ span{1, ẑ} (LayerNorm) or γ⁻¹ ⊙ span{ẑ} (RMSNorm). Where γ has zeros,
    their coordinates e_i are in the kernel, and of γ⁻¹ ⊙ span{1, ẑ} only the part that vanishes there.

    Costs O(d) a token, no product.

    Args:
        normalised: ẑ (…, d): the norm's output before γ and β, of mean square ms/(ms + ε).
        weight: γ (d,), the whole factor (1 + weight for Gemma); None for ones.
        centred: True for LayerNorm, False for RMSNorm.
        tolerance: ẑ is left out of the kernel at tokens where its relative gain ε/(var + ε) is above this.

    Returns:
        basis (…, d, 2), float64: orthonormal columns, or zero columns where the kernel is smaller; zero at
        the zeros of γ. And zeros (d,), bool, True where γ is zero: the e_i of those complete the kernel.

    Examples:
        >>> z = torch.tensor([1.0, -1.0], dtype=torch.float64)
        >>> left_kernel(z, torch.tensor([3.0, 4.0]), centred=False)[0][:, 1]  # γ⁻¹ ⊙ ẑ
        tensor([ 0.8000, -0.6000], dtype=torch.float64)
    """
    z = normalised.detach().double()
    d = z.shape[-1]
    gamma = torch.ones(d, dtype=z.dtype, device=z.device) if weight is None else weight.detach().double()
    zeros = gamma == 0
    is_null = 1 - z.square().mean(-1, keepdim=True) <= tolerance
    one = torch.ones_like(z) if centred else torch.zeros_like(z)
    scaled = torch.where(is_null, z, 0.0)
    if bool(zeros.any()):
        one, scaled = _vanishing_at(zeros, one, scaled)
    inverse = torch.where(zeros, 0.0, gamma[~zeros].abs().min() / gamma) if bool((~zeros).any()) else gamma
    first = _unit(inverse * one)
    second = inverse * scaled
    for _ in range(2):  # twice is enough (Parlett): γ⁻¹ may make 1 and ẑ nearly parallel
        second = second - first * (first * second).sum(-1, keepdim=True)
    return torch.stack((first, _unit(second, (inverse * scaled).norm(dim=-1, keepdim=True))), -1), zeros


def left_kernel_share(
    gradient: Tensor,
    normalised: Tensor,
    weight: Tensor | None,
    centred: bool,
    tolerance: float = KERNEL_GAIN,
) -> Tensor:
    """Share of a gradient's energy that a norm's backward erases: Σ‖P g‖² / Σ‖g‖², P onto the left kernel.

    Costs O(d) a token, no product.

    Args:
        gradient: dLoss/dy (…, d) at the norm's *output*, after γ and β.
        normalised, weight, centred, tolerance: as in `left_kernel`.

    Returns:
        0-dim float64 tensor in [0, 1], over all tokens; nan where the gradient is zero.

    Examples:
        >>> z = torch.tensor([1.0, -1.0, 2.0, -2.0]) / 2.5**0.5
        >>> round(float(left_kernel_share(torch.tensor([1.0, 0.0, 0.0, 0.0]), z, None, centred=True)), 6)
        0.35
    """
    g = gradient.detach().double()
    g = g / g.abs().max()  # squares of small gradients would underflow
    basis, zeros = left_kernel(normalised, weight, centred, tolerance)
    inside = (basis * g.unsqueeze(-1)).sum(-2).square().sum() + g[..., zeros].square().sum()
    return (inside / g.square().sum()).clamp(max=1.0)


def _vanishing_at(zeros: Tensor, one: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Basis of {a·1 + b·ẑ that vanish at `zeros`}: for one zero (or equal entries) a line, else nothing."""
    at_zeros = z[..., zeros]
    level = at_zeros.mean(-1, keepdim=True) if bool(one.any()) else torch.zeros_like(z[..., :1])
    scale = z.abs().amax(-1, keepdim=True)
    vanishes = (at_zeros - level).abs().amax(-1, keepdim=True) <= 1e-6 * scale
    return torch.zeros_like(one), torch.where(vanishes & (scale > 0), z - level * one, 0.0)


def _unit(vector: Tensor, scale: Tensor | None = None) -> Tensor:
    """`vector` at length 1, or zero where it is round-off relative to `scale`."""
    norm = vector.norm(dim=-1, keepdim=True)
    floor = 1e-6 * (norm if scale is None else scale)
    return torch.where(norm > floor, vector / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)
