"""Closed forms of elementwise activations y = φ(z): J = diag(φ′(z)), so that σ = |φ′|, sorted.

    gelu       φ′ = Φ(z) + z N(z)                       in [−0.129, 1.129]; zero at z = −0.7518
    gelu-tanh  φ′ = s + 2z s(1 − s) u′,  s = sigmoid(2u), u = √(2/π)(z + 0.044715 z³)
    silu       φ′ = s + z s(1 − s),      s = sigmoid(z)  in [−0.0998, 1.0998]; zero at z = −1.2785
    relu       φ′ = 1 for z > 0, else 0 (torch's choice at 0)

The kernel, right and left, are the coordinates where φ′ is zero: half of a ReLU's, and of the others those
far on the left, where φ′ underflows. Written with sigmoids and erfc of −z: far out, where 1 + tanh and
1 + erf cancel, φ′ keeps its relative accuracy.

Source: Hendrycks & Gimpel 2016 (GELU, arXiv:1606.08415); Elfwing et al. 2017 (SiLU, arXiv:1702.03118).
"""

from collections.abc import Callable, Mapping
from math import pi, sqrt
from types import MappingProxyType

import torch
from torch import Tensor


def activation_gain(z: Tensor, activation: str) -> Tensor:
    """φ′(z) (…, d): the diagonal of the Jacobian of y = φ(z); finite z.

    Costs O(d) a token, no product. Formulas and sources: see the head of this module.

    Args:
        z: what goes into the activation (…, d).
        activation: a name of `ACTIVATION_GAINS`.

    Raises:
        ValueError: for an activation that is not known.

    Example:
        >>> activation_gain(torch.tensor([-1.0, 0.0, 1.0]), "relu")
        tensor([0., 0., 1.])
    """
    if activation not in ACTIVATION_GAINS:
        raise ValueError(f'activation="{activation}": expected one of {", ".join(ACTIVATION_GAINS)}')
    return ACTIVATION_GAINS[activation](z)


def activation_jacobian(z: Tensor, activation: str) -> Tensor:
    """J (…, d, d) = diag(φ′(z)) of y = φ(z) at z (…, d).

    Costs O(d²) a token, no product. Formulas and sources: see the head of this module.

    Args:
        z: what goes into the activation (…, d).
        activation: a name of `ACTIVATION_GAINS`.

    Raises:
        ValueError: for an activation that is not known.

    Example:
        >>> activation_jacobian(torch.tensor([0.0, 0.0]), "gelu")
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    return torch.diag_embed(activation_gain(z, activation))


def activation_singular_values(z: Tensor, activation: str) -> Tensor:
    """Singular values (…, d), descending, of `activation_jacobian`: |φ′(z)|, sorted.

    Costs O(d log d) a token, no product. Formulas and sources: see the head of this module.

    Args:
        z: what goes into the activation (…, d).
        activation: a name of `ACTIVATION_GAINS`.

    Raises:
        ValueError: for an activation that is not known.

    Example:
        >>> activation_singular_values(torch.tensor([-1.0, 0.0, 1.0]), "silu")
        tensor([0.9277, 0.5000, 0.0723])
    """
    return activation_gain(z, activation).abs().sort(-1, descending=True).values


def activation_kernel(z: Tensor, activation: str) -> Tensor:
    """Where the e_i span the kernel (…, d), bool, right and left: J is diagonal. True where φ′ is zero.

    Costs O(d) a token, no product. Formulas and sources: see the head of this module.

    Args:
        z: what goes into the activation (…, d).
        activation: a name of `ACTIVATION_GAINS`.

    Raises:
        ValueError: for an activation that is not known.

    Example:
        >>> activation_kernel(torch.tensor([-1.0, 2.0]), "relu")
        tensor([ True, False])
    """
    return activation_gain(z, activation) == 0


def _gelu(z: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-z / sqrt(2)) + z * torch.exp(-0.5 * z * z) / sqrt(2 * pi)


def _gelu_tanh(z: Tensor) -> Tensor:
    z = z.clamp(-1e3, 1e3)  # beyond, φ′ is 0 or 1, and z³ may overflow
    s, rest = _sigmoids(2 * sqrt(2 / pi) * (z + 0.044715 * z**3))
    return s + 2 * z * s * rest * sqrt(2 / pi) * (1 + 3 * 0.044715 * z * z)


def _silu(z: Tensor) -> Tensor:
    s, rest = _sigmoids(z)
    return s + z * s * rest


def _relu(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


def _sigmoids(z: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(z), and 1 − sigmoid(z) without the difference."""
    return torch.sigmoid(z), torch.sigmoid(-z)


ACTIVATION_GAINS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": _gelu, "gelu-tanh": _gelu_tanh, "silu": _silu, "relu": _relu}
)
"""Name → φ′, element by element. A new activation is one entry."""
