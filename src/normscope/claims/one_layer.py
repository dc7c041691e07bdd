"""One layer, Post-LN or Pre-LN: our own `Residual` around a branch F of any kind, in float64.

Shapes: T tokens, D width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.linalg import layer_norm_jacobian
from normscope.nn import Attention, FeedForward, Residual, Where

SIZES = ((1, 3), (1, 64), (4, 16), (8, 32))
LARGE = ((16, 64), (1, 1024))
"""Tokens × width, at most 1024 together; the large ones with one branch each."""
NO_EPS = 1e-300
"""ε as good as none: the theorems are stated without."""

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """y = LN(x + F(x)) or y = x + F(LN(x)) at x [T, D], in float64.

    Attributes:
        name: the case, in words.
        x: where.
        branch: F, (T, D) → (T, D).
        residual: how it meets the stream.
    """

    name: str
    x: Tensor
    branch: Map
    residual: Residual

    def __call__(self, x_TD: Tensor) -> Tensor:
        """(T, D) → (T, D)."""
        found = self.residual(x_TD[None], lambda v: self.branch(v[0])[None])
        assert isinstance(found, Tensor)
        return found[0]

    @property
    def norm(self) -> nn.LayerNorm:
        """The one norm."""
        (norm,) = (module for module in self.residual.norms.values() if isinstance(module, nn.LayerNorm))
        return norm

    @property
    def joined(self) -> Tensor:
        """z = x + F(x) [T, D]."""
        with torch.no_grad():
            return self.x + self.branch(self.x)


def layers(scheme: str, seed: int) -> Iterator[Layer]:
    """Layers of a scheme with drawn weights and γ, at drawn inputs; F of every kind."""
    for tokens, width in (*SIZES, *LARGE):
        torch.manual_seed(seed)
        x = torch.randn(tokens, width, dtype=torch.float64)
        for name, branch in branches(tokens, width):
            residual = Residual(scheme, Where(1, 1), width, eps=NO_EPS).double()
            for norm in residual.norms.values():
                if isinstance(norm, nn.LayerNorm):
                    nn.init.normal_(norm.weight, 1.0, 0.1)
            yield Layer(f"{name}, T = {tokens}, d = {width}", x, branch, residual)


def branches(tokens: int, width: int) -> Iterator[tuple[str, Map]]:
    """Differentiable F by name, of one sequence (T, D) → (T, D)."""
    if (tokens, width) != LARGE[1]:
        heads = 1 if width < 16 else 2
        attention = Attention(width, heads, causal=True).double()
        yield "causal attention", lambda x: attention(x[None])[0]
    if (tokens, width) != LARGE[0]:
        yield "feed-forward", FeedForward(width, width).double()
    if (tokens, width) in SIZES:
        both_ways = Attention(width, heads, causal=False).double()
        yield "attention both ways", lambda x: both_ways(x[None])[0]
        size = tokens * width
        mix, shift = torch.randn(size, size, dtype=torch.float64) / size**0.5, torch.randn(size).double()
        yield "random F over all tokens", lambda x: torch.tanh(mix @ x.flatten() + shift).view_as(x)
        yield "F = sin(3x)", lambda x: torch.sin(3 * x)


def by_autograd(f: Map, x: Tensor) -> Tensor:
    """∂f/∂x [T·D, T·D], without fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True)
    return jacobian.reshape(x.numel(), x.numel()).detach()


def norm_jacobians(layer: Layer, z: Tensor) -> Tensor:
    """J_LN of all tokens of z [T, D], a block for each [T·D, T·D]."""
    return torch.block_diag(*layer_norm_jacobian(z, layer.norm.weight.detach(), layer.norm.eps))


def identity(x: Tensor) -> Tensor:
    """I of the size of x."""
    return torch.eye(x.numel(), dtype=x.dtype)


def degenerate_layers(seed: int) -> Iterator[Layer]:
    """Post-LN layers whose F is made to be a hard case."""
    for width in (3, 16, 64):
        torch.manual_seed(seed)
        x, goal = torch.randn(2, 1, width, dtype=torch.float64)
        direction = nn.functional.normalize(torch.randn(width, dtype=torch.float64), dim=0)
        matrix = torch.randn(width, width, dtype=torch.float64)
        residual = Residual("post", Where(1, 1), width, eps=NO_EPS).double()
        for name, branch in (
            ("F = 0", lambda x: 0 * x),
            ("F = −x + a constant", lambda x, goal=goal: goal - x),
            ("F = −(x·u)u, I + J_F singular", lambda x, u=direction: -(x @ u)[:, None] * u),
            ("F = 1000 W x", lambda x, w=matrix: 1000 * x @ w),
            ("F = W x³", lambda x, w=matrix: x**3 @ w),
        ):
            yield Layer(f"{name}, d = {width}", x, branch, residual)


def pulled_back(layer: Layer, rows: Tensor) -> Tensor:
    """Jᵀu [k, T·D] of rows u, by the backward pass."""
    x = layer.x.detach().requires_grad_()
    out = layer(x)
    pulled = [torch.autograd.grad(out, x, row.view_as(x), retain_graph=True)[0] for row in rows]
    return torch.stack(pulled).flatten(1)
