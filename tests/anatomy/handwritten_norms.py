"""LayerNorm, RMSNorm and the L2 norm written by hand."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from handwritten_base import POST, PRE, WIDTH, Block, Tower, case, reading, tower
from handwritten_placements import Post
from torch import Tensor, nn


class HandNorm(nn.Module):
    """A norm of the last axis from its formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor], offset: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.formula, self.offset = formula, offset
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 - offset))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.formula(x) * (self.offset + self.weight) if self.offset else self.weight * self.formula(x)
        return y if self.bias is None else y + self.bias


def _mean_variance(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def _centred_then_rms(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rms_in_float32(x: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


LAYER_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean-variance": _mean_variance,
    "var-rsqrt": lambda x: (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
    ),
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "centred-then-rms": _centred_then_rms,
    "functional": lambda x: F.layer_norm(x, (WIDTH,)),
    "in-float64": lambda x: F.layer_norm(x.double(), (WIDTH,)).to(x.dtype),
}
RMS_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow-mean-rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "square-sqrt-div": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "norm-over-root-d": lambda x: x / (x.norm(dim=-1, keepdim=True) / math.sqrt(WIDTH) + 1e-8),
    "sum-over-d": lambda x: x / (x.square().sum(-1, keepdim=True) / WIDTH + 1e-6) ** 0.5,
    "float-casts": _rms_in_float32,
    "functional": lambda x: F.rms_norm(x, (WIDTH,)),
    "normalize-times-root-d": lambda x: F.normalize(x, dim=-1) * math.sqrt(WIDTH),
}
for name, formula in LAYER_NORMS.items():
    case(f"layernorm-{name}", lambda f=formula: with_norm(Block, lambda: HandNorm(f, bias=True)), PRE)
    case(f"layernorm-post-{name}", lambda f=formula: with_norm(Post, lambda: HandNorm(f, bias=True)), POST)
for name, formula in RMS_NORMS.items():
    rms = reading("A.pre F.pre", norm="rmsnorm")
    case(f"rmsnorm-{name}", lambda f=formula: with_norm(Block, lambda: HandNorm(f)), rms)
case(
    "rmsnorm-one-plus-gamma",
    lambda: with_norm(Block, lambda: HandNorm(_rms_in_float32, offset=1.0)),
    reading("A.pre F.pre", norm="rmsnorm"),
)
case(
    "l2norm",
    lambda: with_norm(Block, lambda: HandNorm(lambda x: F.normalize(x, dim=-1))),
    reading("A.pre F.pre", norm="l2norm"),
)


class GammaFirst(nn.Module):
    """γ·(x − μ)/(σ + ε) + β, as in The Annotated Transformer: γ is applied before the division."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.beta = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.gamma * (x - mean) / (std + 1e-6) + self.beta


class ScaleNorm(nn.Module):
    """g·x/‖x‖ with one learnt g in front (Nguyen & Salazar 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(WIDTH**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


case("layernorm-gamma-first", lambda: with_norm(Block, GammaFirst), PRE)
case("layernorm-post-gamma-first", lambda: with_norm(Post, GammaFirst), POST)
case(
    "l2norm-gain-first",
    lambda: with_norm(Block, ScaleNorm),
    reading("A.pre F.pre", norm="l2norm"),
)


def with_norm(block: Callable[[], Block], norm: Callable[[], nn.Module]) -> Tower:
    """A tower whose every norm is made by `norm`; without a final one when the block is Post-LN."""
    model = tower(block, nn.Identity if block is Post else norm)
    for member in model.blocks:
        member.norm1, member.norm2 = norm(), norm()
    return model


class Formula(nn.Module):
    """A function as a module."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


def _rms(x: Tensor, *axes: int) -> Tensor:
    return x * torch.rsqrt(x.square().mean(axes or None, keepdim=bool(axes)) + 1e-6)


# What is taken over tokens or over groups of features is no norm of each token's features.
OTHER_AXES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "rms-tokens": ("groupnorm", lambda x: _rms(x, 1)),
    "layernorm-tokens-transposed": ("groupnorm", lambda x: F.layer_norm(x.mT, x.shape[1:2]).mT),
    "layernorm-tokens-and-features": ("groupnorm", lambda x: F.layer_norm(x, x.shape[1:])),
    "rms-tokens-and-features": ("groupnorm", lambda x: _rms(x, 1, 2)),
    "rms-tokens-and-features-flat": ("groupnorm", lambda x: _rms(x.flatten(1), 1).view_as(x)),
    "l2-tokens": ("groupnorm", lambda x: F.normalize(x, dim=1)),
    "rms-groups": ("groupnorm", lambda x: _rms(x.unflatten(-1, (4, 4)), -1).flatten(2)),
    "rms-everything": ("batchnorm", _rms),
    "norm-everything": ("batchnorm", lambda x: x / x.norm() * x.numel() ** 0.5),
    "layernorm-batch": ("batchnorm", lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()),
    "layernorm-rows": ("layernorm", lambda x: F.layer_norm(x.flatten(0, 1), (WIDTH,)).view_as(x)),
    "rms-channels-first": ("rmsnorm", lambda x: _rms(x.mT, 1).mT),
}
for name, (kind, formula) in OTHER_AXES.items():
    case(
        f"axes-{name}",
        lambda f=formula: with_norm(Block, lambda: Formula(f)),
        reading("A.pre F.pre", norm=kind),
    )
