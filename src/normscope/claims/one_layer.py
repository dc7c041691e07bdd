"""One layer, Post-LN or Pre-LN: our own `Residual` around a branch F of any kind, in float64.

Shapes: T tokens, D width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normscope.claims.real_blocks import Layer, Map
from normscope.nn import Attention, FeedForward, Residual, Where

SIZES = ((1, 3), (1, 64), (4, 16), (8, 32))
LARGE = ((16, 64), (1, 1024))
"""Tokens × width, at most 1024 together; the large ones with one branch each."""
NO_EPS = 1e-300
"""ε as good as none: the theorems are stated without."""


def layers(scheme: str, seed: int) -> Iterator[Layer]:
    """Layers of a scheme with drawn weights and γ, at drawn inputs; F of every kind."""
    for tokens, width in (*SIZES, *LARGE):
        torch.manual_seed(seed)
        x = torch.randn(1, tokens, width, dtype=torch.float64)
        for name, branch in branches(tokens, width):
            layer = Layer(f"{name}, T = {tokens}, d = {width}", x, branch, residual(scheme, width))
            nn.init.normal_(layer.norm.weight, 1.0, 0.1)
            yield layer


def residual(scheme: str, width: int, eps: float = NO_EPS) -> Residual:
    """The norm and the sum of the only layer of a stack."""
    return Residual(scheme, Where(1, 1), width, eps=eps).double()


def branches(tokens: int, width: int) -> Iterator[tuple[str, Map]]:
    """Differentiable F by name, of one sequence (1, T, D) → (1, T, D)."""
    heads = 1 if width < 16 else 2
    if (tokens, width) != LARGE[1]:
        yield "causal attention", Attention(width, heads, causal=True).double()
    if (tokens, width) != LARGE[0]:
        yield "feed-forward", FeedForward(width, width).double()
    if (tokens, width) in SIZES:
        yield "attention both ways", Attention(width, heads, causal=False).double()
        size = tokens * width
        mix, shift = torch.randn(size, size, dtype=torch.float64) / size**0.5, torch.randn(size).double()
        yield "random F over all tokens", lambda x: torch.tanh(mix @ x.flatten() + shift).view_as(x)
        yield "F = sin(3x)", lambda x: torch.sin(3 * x)


def degenerate_layers(seed: int) -> Iterator[Layer]:
    """Post-LN layers whose F is made to be a hard case."""
    for width in (3, 16, 64):
        torch.manual_seed(seed)
        x, goal = torch.randn(2, 1, 1, width, dtype=torch.float64)
        direction = nn.functional.normalize(torch.randn(width, dtype=torch.float64), dim=0)
        matrix = torch.randn(width, width, dtype=torch.float64)
        for name, branch in (
            ("F = 0", lambda x: 0 * x),
            ("F = −x + a constant", lambda x, goal=goal: goal - x),
            ("F = −(x·u)u, I + J_F singular", lambda x, u=direction: -(x @ u)[..., None] * u),
            ("F = 1000 W x", lambda x, w=matrix: 1000 * x @ w),
            ("F = W x³", lambda x, w=matrix: x**3 @ w),
        ):
            yield Layer(f"{name}, d = {width}", x, branch, residual("post", width))


def pulled_back(layer: Layer, rows: Tensor) -> Tensor:
    """Jᵀu [k, T·D] of rows u, by the backward pass."""
    x = layer.x.detach().requires_grad_()
    pulled = torch.autograd.grad(layer(x), x, rows.unflatten(1, x.shape), is_grads_batched=True)[0]
    return pulled.flatten(1)
