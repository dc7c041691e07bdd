"""The linear maps of the branches, and learnt gains."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.tensors import unit, wide


class Gain(nn.Module):
    """A learnt tensor with the value weight·start/held; the weight starts at `held`.

    Adam moves each weight by about the learning rate; with a small `held` that is a large part of the value
    (nGPT, Loshchilov et al. 2024, arXiv:2410.01131, §2.5, has held = 1/√D).

    Args:
        shape: shape of the gain.
        start: initial value of the gain.
        held: initial value of the weight.
    """

    def __init__(self, shape: tuple[int, ...], *, start: float, held: float) -> None:
        super().__init__()
        self.factor = start / held
        self.weight = nn.Parameter(torch.full(shape, held))

    def forward(self) -> Tensor:
        """The gain, of `shape`."""
        return self.factor * self.weight


class SigmaLinear(nn.Linear):
    """x Ŵᵀ + b, Ŵ = (γ/σ(W)) W, γ one learnt number from 1 (Zhai et al. 2023, arXiv:2303.06296).

    σ(W) = uᵀ W v, with the top singular vectors u (out) and v (in) in buffers, through which no gradient
    flows. They start exact (`settle`); each forward in train mode makes one step of power iteration.
    """

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.gain = nn.Parameter(torch.ones(1))
        self.u: Tensor
        self.v: Tensor
        self.register_buffer("u", torch.zeros(out_features))
        self.register_buffer("v", torch.zeros(in_features))
        self.settle()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        if self.training:
            self._step()
        weight = wide(self.weight)
        # Copies: the next forward changes the buffers, but this one's backward needs their current values.
        sigma = wide(self.u.clone()) @ weight @ wide(self.v.clone())
        return F.linear(x, (wide(self.gain) / sigma * weight).to(x.dtype), self.bias)

    @torch.no_grad()
    def settle(self) -> None:
        """Compute u and v exactly, for weights that were drawn or changed other than by training."""
        weight = wide(self.weight)
        # The smaller Gram matrix is several times cheaper than an SVD.
        if self.in_features <= self.out_features:
            v = torch.linalg.eigh(weight.mT @ weight).eigenvectors[:, -1]
            u = unit(weight @ v)
        else:
            u = torch.linalg.eigh(weight @ weight.mT).eigenvectors[:, -1]
            v = unit(u @ weight)
        self.u.copy_(u)
        self.v.copy_(v)

    @torch.no_grad()
    def _step(self) -> None:
        weight = wide(self.weight)
        u = unit(weight @ wide(self.v))
        self.u.copy_(u)
        self.v.copy_(unit(u @ weight))


LINEARS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType({"plain": nn.Linear, "sigma": SigmaLinear})
"""Name → maker of (in_features, out_features, bias=…)."""
