"""Maps with their inputs, in float64, for every operator and algorithm; the dense reference."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    f: Map
    x: Tensor

    @property
    def dense(self) -> Tensor:
        """The whole Jacobian, by reverse mode one row at a time."""
        return dense_jacobian(self.f, self.x)


def dense_jacobian(f: Map, x: Tensor) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(f, x)
    return jacobian.reshape(-1, x.numel())


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _attention(x: Tensor) -> Tensor:
    q, k, v = (x @ _random(6, 6, seed=s) / 6**0.5 for s in (1, 2, 3))
    logits = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    return logits.softmax(-1) @ v


def _pre_block(x: Tensor) -> Tensor:
    x = x + _attention(F.layer_norm(x, (6,)))
    return x + F.gelu(F.layer_norm(x, (6,)) @ _random(6, 6, seed=4)) @ _random(6, 6, seed=5)


def _post_block(x: Tensor) -> Tensor:
    x = F.layer_norm(x + _attention(x), (6,))
    return F.layer_norm(x + F.gelu(x @ _random(6, 6, seed=4)), (6,))


def _deep(x: Tensor) -> Tensor:
    for _ in range(4):
        x = _pre_block(x)
    return x


_X = _random(1, 4, 6, seed=9)
_WIDE, _TALL = _random(5, 24, seed=6), _random(40, 24, seed=7)

CASES = [
    Case("pre-ln block", _pre_block, _X),
    Case("post-ln block", _post_block, _X),
    Case("attention", _attention, _X),
    Case("wide", lambda x: torch.tanh(_WIDE @ x.reshape(-1)), _X),
    Case("tall", lambda x: torch.sin(_TALL @ x.reshape(-1)), _X),
    Case("identity", lambda x: x.clone(), _X),
    Case("zero", lambda x: 0 * x, _X),
    Case("view", lambda x: x.transpose(1, 2).flip(1), _X),
    Case("deep", _deep, _X),
]


class DiagonalMap:
    """A map with known singular values: diag(σ), or U diag(σ) Vᵀ of random rotations."""

    def __init__(self, values: Tensor, *, rotated: bool = False, seed: int = 0) -> None:
        n = len(values)
        self.values, self.dtype, self.device = values, values.dtype, values.device
        self.shape = (n, n)
        self.num_products = 0
        self._u = torch.linalg.qr(_random(n, n, seed=seed))[0].to(values.dtype) if rotated else None
        self._v = torch.linalg.qr(_random(n, n, seed=seed + 1))[0].to(values.dtype) if rotated else None

    def matvec(self, v: Tensor) -> Tensor:
        self.num_products += 1
        if self._u is None or self._v is None:
            return self.values * v
        return self._u @ (self.values * (self._v.T @ v))

    def rmatvec(self, u: Tensor) -> Tensor:
        self.num_products += 1
        if self._u is None or self._v is None:
            return self.values * u
        return self._v @ (self.values * (self._u.T @ u))


class ConstantBackward(torch.autograd.Function):
    """Right first derivative, but its backward leaves autograd: Jv is silently zero."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(gradient.detach().numpy() * x.detach().cos().numpy())


class StraightThrough(ConstantBackward):
    """Linear in the gradient, so the adjoint test passes; only comparison with the function detects it."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient
