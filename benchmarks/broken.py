"""Models that are broken on purpose, and changes that break a healthy one.

The thresholds (benchmarks/thresholds.py), the pages of the findings (docs/findings) and tests use them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Change = Callable[[nn.Module], None]
Model = TypeVar("Model", bound=nn.Module)


class Unnormed(nn.Module):
    """x + F(x) with no norm anywhere, 12 blocks; Xavier weights times `first` and `last` in each branch."""

    def __init__(self, width: int, first: float = 1.0, last: float = 1.0):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(12)
        )
        self.head = nn.Linear(width, 256)
        for name, weight in self.layers.named_parameters():
            if name.endswith("weight"):
                nn.init.xavier_normal_(weight, first if ".0." in name else last)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTC = x_BTC + layer(x_BTC)
        return self.head(x_BTC)


class AttentionOnly(nn.Module):
    """Four Pre-LN attention branches and no feed-forward; `scale` multiplies the logits.

    The projections have PyTorch's default weights, or N(0, `std`²) for queries, keys and values.
    """

    def __init__(self, width: int, heads: int, scale: float, std: float | None = None):
        super().__init__()
        self.embedding, self.heads, self.scale = nn.Embedding(256, width), heads, scale
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 256)
        if std is not None:
            for name, weight in self.qkv.named_parameters():
                if name.endswith("weight"):
                    nn.init.normal_(weight, std=std)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        later = torch.ones(ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool).triu(1)
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=False):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(norm(x_BTC)).chunk(3, -1)
            )
            weights = (self.scale * q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
            x_BTC = x_BTC + out((weights @ v).transpose(1, 2).flatten(2))
        return self.head(self.norms[-1](x_BTC))


class TimesBackward(torch.autograd.Function):
    """x, with a backward that is `factor` times the right one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


def wrong_backward(width: int, factor: float) -> Unnormed:
    """The stack without norms; the gradient of its second branch is multiplied by `factor`."""
    model = Unnormed(width)
    model.layers[1].register_forward_hook(lambda module, given, out: TimesBackward.apply(out, factor))
    return model


def changed(model: Model, change: Change | None) -> Model:
    """The model after a change of its weights."""
    with torch.no_grad():
        if change is not None:
            change(model)
    return model


def scaled(pattern: str, factor: float) -> Change:
    """Multiply every parameter whose name contains `pattern`."""

    def change(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            if pattern in name:
                weight.mul_(factor)

    return change


def queries_and_keys(factor: float) -> Change:
    """Multiply the rows of queries and keys of every `nn.MultiheadAttention`."""

    def change(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            if "in_proj_weight" in name:
                weight[: 2 * weight.shape[1]].mul_(factor)

    return change


def epsilon(value: float) -> Change:
    """Set the ε of every LayerNorm."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = value

    return change


def dead(model: nn.Module) -> None:
    """Set the feed-forward branch of `layers.3` to zero and freeze it."""
    for name, weight in model.named_parameters():
        if "layers.3.linear" in name:
            weight.zero_().requires_grad_(False)


def nan_weight(model: nn.Module) -> None:
    """Set one weight of the fifth block to NaN."""
    model.get_parameter("encoder.layers.4.linear1.weight")[0, 0] = float("nan")
