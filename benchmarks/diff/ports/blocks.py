"""Norm, attention and feed-forward layer as a user writes them; `Config` has what ports get wrong."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Options of a `Port`, of all layers unless `layers` says otherwise: layer → options.

    Attributes:
        gain: added to γ.
        shift: added to the positions.
        order: thirds of the fused output that are q, k and v.
        by_head: whether the fused output holds q, k and v of each head together.
        scale: factor of the attention logits, 1/√d_h if None.
        tiled: whether head i uses the keys i modulo their number, and not those of its group.
        written: whether attention is written out; else PyTorch's function computes it.
        drop: dropout of the probabilities, also in eval mode.
        gradient: factor of the branches' gradients.
    """

    width: int = 32
    depth: int = 3
    heads: int = 4
    kv_heads: int = 4
    hidden: int = 80
    vocabulary: int = 256
    length: int = 64
    norm: str = "layer"
    gain: float = 0.0
    eps: float = 1e-5
    norm_in: bool = True
    norm_out: bool = False
    norm_stream: bool = False
    norm_final: bool = True
    positions: str = "learnt"
    base: float = 10000.0
    shift: int = 0
    fused: bool = True
    order: tuple[int, int, int] = (0, 1, 2)
    by_head: bool = False
    bias: bool = True
    bias_out: bool = True
    scale: float | None = None
    cap: float | None = None
    cap_final: float | None = None
    qk_norm: str = "none"
    tiled: bool = False
    window: int | None = None
    mask: str = "causal"
    written: bool = True
    drop: float = 0.0
    act: str = "gelu tanh"
    gated: bool = False
    gate_first: bool = True
    embed: float = 1.0
    branch: float = 1.0
    tied: bool = True
    residual: str = "stream"
    parallel: bool = False
    detach: str = ""
    gradient: float = 1.0
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def at(self, layer: int) -> "Config":
        """The options of one layer."""
        return replace(self, **self.layers.get(layer, {}))


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).square(),
}


class Norm(nn.Module):
    """LayerNorm or RMSNorm, written out, with the factor γ or 1 + γ."""

    def __init__(self, config: Config, width: int | None = None):
        super().__init__()
        self.is_rms, self.eps, self.gain = config.norm == "rms", config.eps, config.gain
        start = torch.full((width or config.width,), 1.0 - config.gain)
        self.g = nn.Parameter(start)
        self.b = None if self.is_rms else nn.Parameter(torch.zeros_like(start))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_rms:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.g + self.gain)
        return x if self.b is None else x + self.b


class Scaled(torch.autograd.Function):
    """The identity with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def rotated(x: Tensor, config: Config) -> Tensor:
    """Rotary positions of (B, H, T, d_h), by halves or by neighbours."""
    length, width = x.shape[-2:]
    rates = config.base ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = (torch.arange(length, dtype=x.dtype) + config.shift)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    if config.positions == "interleaved":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def shown(length: int, config: Config) -> Tensor:
    """Which keys a query sees, (T, T)."""
    offset = torch.arange(length)[:, None] - torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool) if config.mask == "none" else offset >= 0
    if config.mask == "strict":
        seen = (offset > 0) | ((offset == 0) & (torch.arange(length) == 0))
    return seen if config.window is None else seen & (offset < config.window)


class Attention(nn.Module):
    """Self-attention with q, k and v in one matrix or in three."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.size = config, config.width // config.heads
        kv = self.size * config.kv_heads
        if config.fused:
            self.wqkv = nn.Linear(config.width, config.width + 2 * kv, bias=config.bias)
        else:
            self.wq = nn.Linear(config.width, config.width, bias=config.bias)
            self.wk, self.wv = (nn.Linear(config.width, kv, bias=config.bias) for _ in "kv")
        self.wo = nn.Linear(config.width, config.width, bias=config.bias_out)
        if config.qk_norm != "none":
            is_whole = config.qk_norm == "whole"
            self.nq = Norm(config, config.width if is_whole else self.size)
            self.nk = Norm(config, kv if is_whole else self.size)

    def split(self, x: Tensor) -> list[Tensor]:
        """q, k and v, (B, T, features)."""
        config = self.config
        if not config.fused:
            return [self.wq(x), self.wk(x), self.wv(x)]
        fused = self.wqkv(x)
        if config.by_head:
            parts = fused.unflatten(-1, (config.heads, 3, self.size)).unbind(-2)
            return [part.flatten(-2) for part in parts]
        kv = self.size * config.kv_heads
        parts = fused.split((config.width, kv, kv), -1)
        return [parts[each] for each in config.order]

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        q, k, v = self.split(x)
        if config.qk_norm == "whole":
            q, k = self.nq(q), self.nk(k)
        q, k, v = (each.unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (q, k, v))
        if config.qk_norm == "head":
            q, k = self.nq(q), self.nk(k)
        if config.positions in ("halves", "interleaved"):
            q, k = rotated(q, config), rotated(k, config)
        copies = config.heads // config.kv_heads
        if copies > 1:
            k, v = (
                y.repeat(1, copies, 1, 1) if config.tiled else y.repeat_interleave(copies, 1) for y in (k, v)
            )
        return self.wo(self.mixed(q, k, v).transpose(1, 2).flatten(2))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention (B, H, T, d_h)."""
        config = self.config
        seen = shown(q.shape[-2], config)
        scale = self.size**-0.5 if config.scale is None else config.scale
        if not config.written:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, dropout_p=config.drop)
        logits = q @ k.transpose(-1, -2) * scale
        if config.cap is not None:
            logits = config.cap * torch.tanh(logits / config.cap)
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        return F.dropout(weights, config.drop) @ v


class Mlp(nn.Module):
    """Feed-forward layer, gated or not."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.act = config, ACTIVATIONS[config.act]
        self.inner = nn.Linear(config.width, config.hidden, bias=config.bias_out)
        if config.gated:
            self.other = nn.Linear(config.width, config.hidden, bias=config.bias_out)
        self.outer = nn.Linear(config.hidden, config.width, bias=config.bias_out)

    def forward(self, x: Tensor) -> Tensor:
        if not self.config.gated:
            return self.outer(self.act(self.inner(x)))
        gate, up = self.inner(x), self.other(x)
        return self.outer(self.act(gate) * up if self.config.gate_first else gate * self.act(up))
