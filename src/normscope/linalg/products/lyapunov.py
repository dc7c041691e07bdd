"""Lyapunov exponents of a product of factors: averages of the QR log diagonals, not log singular values.

    J_l Q_{l−1} = Q_l R_l,  Q_0 = I,   λ_i = (1/L) Σ_l log |R_l,ii|

λ is the limit of (log σ_i)/L as L → ∞ for stationary factors. At finite L the two differ: the exponents
depend on Q_0 and know nothing of shear (J = [[1, a], [0, 1]] has λ = 0 but σ ≈ a^±1); only their sums agree,
Σλ_i = log|det J|/L. They do not replace `product_log_singular_values`.

Source: Benettin et al. 1980; Dieci, Russell & Van Vleck 1997.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import torch
from torch import Tensor

from normscope.linalg.golub_kahan import LinearMap, check_confidence
from normscope.linalg.products.spectrum import dense_factors, factor_sizes

BLOCKS = 10  # number of runs of layers whose averages give the error: neighbouring layers are not independent


@dataclass(frozen=True)
class LyapunovExponents:
    """Exponents in nats a layer.

    Attributes:
        values: λ [..., d], descending; −inf where some R_ii is zero.
        error: half-width of the interval for the limit L → ∞ at the given confidence [..., d], from the
            spread between runs of layers; it holds for stationary factors. inf with fewer than two layers
            per run.
        products: products with the factors spent; 0 for dense factors.
    """

    values: Tensor = field(repr=False)
    error: Tensor = field(repr=False)
    products: int


def lyapunov_exponents(
    factors: Tensor | Sequence[LinearMap], *, confidence: float = 0.95
) -> LyapunovExponents:
    """λ of J_L ⋯ J_1, of each of a batch of products. Costs a QR decomposition and a product a factor.

    Args:
        factors: dense [..., L, d, d] with J_1 first, or L square maps; as `product_log_singular_values`.
        confidence: of the error.

    Raises:
        ValueError: as `product_log_singular_values`; a confidence outside (0, 1).
        FloatingPointError: a factor is not finite.

    Examples:
        >>> shear = torch.tensor([[1.0, 100.0], [0.0, 1.0]]).expand(1, 2, 2)
        >>> lyapunov_exponents(shear).values.abs()  # yet its log σ is ±4.6
        tensor([0., 0.], dtype=torch.float64)
    """
    check_confidence(confidence)
    lead, d, length = factor_sizes(factors)
    steps, q = [], None
    for factor in dense_factors(factors):
        q, r = torch.linalg.qr(factor if q is None else factor @ q)
        steps.append(r.diagonal(dim1=-2, dim2=-1).abs().log())
    logs = torch.stack(steps)  # [L, B, d]
    values, order = logs.mean(0).sort(dim=-1, descending=True)
    error = _error(logs, confidence).gather(-1, order)
    spent = 0 if isinstance(factors, Tensor) else length * d
    return LyapunovExponents(values.reshape(*lead, d), error.reshape(*lead, d), spent)


def _error(logs: Tensor, confidence: float) -> Tensor:
    """Student's t over the means of BLOCKS runs of layers [B, d]."""
    run = len(logs) // BLOCKS
    if run < 2:
        return torch.full_like(logs[0], inf)
    from scipy.special import stdtrit  # imported late: it is slow to import

    means = logs[-run * BLOCKS :].unflatten(0, (BLOCKS, run)).mean(1)
    quantile = float(stdtrit(BLOCKS - 1, (1 + confidence) / 2))
    return quantile * means.std(0) / sqrt(BLOCKS)
