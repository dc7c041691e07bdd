"""Closed forms of a softmax row and of one attention output: the matrix, singular values, bounds, kernels.

    p = softmax(c z):   J = ∂p/∂z = c (diag(p) − ppᵀ)          symmetric, σ ≤ c · 2 max p(1 − p) ≤ c/2
    o = Σ p_i v_i:      ∂o/∂z = c (p ⊙ (V − 1oᵀ))ᵀ              rank ≤ min(d, visible − 1)

Adding a constant to all logits changes nothing: 1 over the visible entries is in the kernel, on both sides.
A masked entry (logit −∞) has p = 0: its e_i is in the kernel too. Saturation, p near a one-hot, shrinks every
other direction by 1 − max p: not a kernel, but soon as good as one.

1 − p is taken as the sum of the other entries, so that a saturated row keeps its relative accuracy, which
autograd's own backward loses.

Shapes: T logits last; leading axes (…) are heads and queries. Source: the quotient rule; interlacing of a
rank-one change: Golub 1973, "Some modified matrix eigenvalue problems"; σ ≤ 1/2: Gershgorin's circles.
"""

import torch
from torch import Tensor


def softmax_jacobian(logits: Tensor, *, scale: float = 1.0) -> Tensor:
    """J (…, T, T) = c (diag(p) − ppᵀ) of p = softmax(c z) at the logits z (…, T).

    Costs O(T²) a row, no product. Source: the quotient rule.

    Args:
        logits: z (…, T) before the scale; −∞ where masked.
        scale: c, not negative: 1/√d of attention, or one over the temperature.

    Raises:
        ValueError: for a row of which nothing is visible.

    Example:
        >>> softmax_jacobian(torch.zeros(2))
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
    """
    p = _probabilities(logits, scale)
    return scale * (torch.diag_embed(p * _others(p)) - _off_diagonal(p))


def softmax_singular_values(logits: Tensor, *, scale: float = 1.0) -> Tensor:
    """Singular values (…, T), descending, of `softmax_jacobian`.

    Between neighbours of the sorted p: p₁ ≥ σ₁/c ≥ p₂ ≥ … ≥ σ_{T−1}/c ≥ p_T ≥ 0 = σ_T (interlacing). Closed
    only for T = 2, σ = 2c p₁p₂, and for equal logits, σ = c/T; else the squares of the singular values of
    (I − √p √pᵀ) diag(√p), which loses half as many digits of the small ones as the SVD of J would.

    Costs O(T³) a row, no product. Source: Golub 1973 (interlacing).

    Args:
        logits: z (…, T) before the scale; −∞ where masked.
        scale: c, not negative.

    Raises:
        ValueError: for a row of which nothing is visible.

    Example:
        >>> softmax_singular_values(torch.zeros(4))
        tensor([0.2500, 0.2500, 0.2500, 0.0000])
    """
    p = _probabilities(logits, scale).sort(-1, descending=True).values
    root = p.sqrt()
    factor = torch.diag_embed(root * _others(p)) - _off_diagonal(p) / root.unsqueeze(-1).clamp_min(_tiny(p))
    values = torch.linalg.svdvals(factor).square()
    return scale * torch.cat((values[..., :-1], torch.zeros_like(values[..., -1:])), -1)


def softmax_norm_bound(logits: Tensor, *, scale: float = 1.0) -> Tensor:
    """c · 2 max p(1 − p) ≥ ‖J‖ (…): at most c/2, and small where the row is saturated or flat and long.

    Costs O(T) a row, no product. Source: Gershgorin's circles, whose row sums are 2 p_i (1 − p_i).

    Args:
        logits: z (…, T) before the scale; −∞ where masked.
        scale: c, not negative.

    Raises:
        ValueError: for a row of which nothing is visible.

    Example:
        >>> softmax_norm_bound(torch.zeros(2))  # reached: σ₁ = 1/2
        tensor(0.5000)
    """
    p = _probabilities(logits, scale)
    return 2 * scale * (p * _others(p)).amax(-1)


def softmax_kernel(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of `softmax_jacobian`, right and left: it is symmetric. Masking widens it.

    Costs O(T) a row, no product. Source: softmax(z + a·1) = softmax(z).

    Args:
        logits: z (…, T); −∞ where masked.

    Returns:
        basis (…, T, 1): 1 over the visible entries, at length 1; and masked (…, T), bool: the e_i of those
        complete the kernel. The kernel has 1 + (number masked) dimensions, and all T where one is visible.

    Raises:
        ValueError: for a row of which nothing is visible.

    Example:
        >>> basis, masked = softmax_kernel(torch.tensor([0.3, float("-inf")]))
        >>> basis.squeeze(-1), masked
        (tensor([1., 0.]), tensor([False,  True]))
    """
    masked = _checked(logits) == -torch.inf
    visible = (~masked).to(logits.dtype)
    return (visible / visible.norm(dim=-1, keepdim=True)).unsqueeze(-1), masked


def attention_row_jacobian(logits: Tensor, values: Tensor, *, scale: float = 1.0) -> Tensor:
    """∂o/∂z (…, d, T) of one attention output o = Σ p_i v_i by its logits: columns c p_i (v_i − o).

    A logit moves the output towards its value, away from the mean; where all values are alike, or one p is 1,
    it moves nothing. Its right kernel holds that of `softmax_jacobian`.

    Costs O(T d) a row, no product. Source: the chain rule, Vᵀ c (diag(p) − ppᵀ).

    Args:
        logits: z (…, T) before the scale; −∞ where masked.
        values: V (…, T, d).
        scale: c, not negative.

    Raises:
        ValueError: for a row of which nothing is visible.

    Example:
        >>> attention_row_jacobian(torch.zeros(2), torch.tensor([[1.0], [-1.0]]))
        tensor([[ 0.5000, -0.5000]])
    """
    p = _probabilities(logits, scale).unsqueeze(-1)
    nearest = values.gather(-2, p.argmax(-2, keepdim=True).expand(*values.shape[:-2], 1, values.shape[-1]))
    moved = values - nearest  # v_i − o from the likeliest value: small where the row is saturated
    return scale * (p * (moved - (p * moved).sum(-2, keepdim=True))).transpose(-1, -2)


def _checked(logits: Tensor) -> Tensor:
    if bool((logits == -torch.inf).all(-1).any()):
        raise ValueError(f"logits of shape {tuple(logits.shape)} with a row that is masked throughout")
    return logits


def _probabilities(logits: Tensor, scale: float) -> Tensor:
    if not scale >= 0:
        raise ValueError(f"scale={scale}: expected a number that is not negative")
    masked = _checked(logits) == -torch.inf
    return (scale * logits.masked_fill(masked, 0.0)).masked_fill(masked, -torch.inf).softmax(-1)


def _others(p: Tensor) -> Tensor:
    """1 − p_i (…, T) as the sum of the others: from both sides, so that nothing cancels."""
    zero = torch.zeros_like(p[..., :1])
    before = torch.cat((zero, p[..., :-1].cumsum(-1)), -1)
    after = torch.cat((p[..., 1:].flip(-1).cumsum(-1).flip(-1), zero), -1)
    return before + after


def _off_diagonal(p: Tensor) -> Tensor:
    """ppᵀ (…, T, T) with zeros on its diagonal."""
    outer = p.unsqueeze(-1) * p.unsqueeze(-2)
    return outer - torch.diag_embed(outer.diagonal(dim1=-2, dim2=-1))


def _tiny(p: Tensor) -> float:
    return torch.finfo(p.dtype).tiny
