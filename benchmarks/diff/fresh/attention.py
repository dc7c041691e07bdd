"""Options of a decoder, its norms, and attention in three styles: fused, by kernels, and written out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Canon = dict[str, Tensor]
ACTS = {
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


@dataclass(frozen=True)
class Opt:
    """Options of a decoder, of all layers unless `layers` says otherwise: layer → options.

    Attributes:
        plus: number that is added to the gains of norms.
        shared: whether parallel branches read one norm.
        table: first row of the position table that is used; None where there is no table.
        turned: features of a head that are rotated, `pairs` says whether neighbours are.
        slopes: ALiBi's: "closest" power of two, "next" one, "plain" or "late", which begin at 1.
        qk: "head" norms each head before the rotation, "late" after it.
    """

    width: int = 48
    depth: int = 2
    heads: int = 4
    kv: int = 4
    size: int = 12
    hidden: int = 96
    vocab: int = 97
    length: int = 80
    norm: str = "rms"
    norm_bias: bool = False
    eps: float = 1e-6
    plus: float = 0.0
    parallel: bool = False
    shared: bool = False
    table: int | None = None
    turned: int = 0
    pairs: bool = False
    base: float = 10000.0
    slopes: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True
    up_first: bool = False
    act: str = "silu"
    emb: float = 1.0
    branch: float = 1.0
    scale: float | None = None
    logits: float = 1.0
    cap: float | None = None
    emb_norm: bool = False
    final: bool = True
    tied: bool = False
    window: int | None = None
    qk: str = ""
    tile: bool = False
    mask: str = "causal"
    drop: float = 0.0
    source: str = "stream"
    cut: bool = False
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def at(self, layer: int) -> "Opt":
        """The options of one layer."""
        return replace(self, **self.layers.get(layer, {}))


class Norm(nn.Module):
    """LayerNorm or RMSNorm by hand, with γ + `plus` as its factor."""

    def __init__(self, opt: Opt, width: int | None = None):
        super().__init__()
        self.centred, self.eps, self.plus = opt.norm == "ln", opt.eps, opt.plus
        self.scale = nn.Parameter(torch.full((width or opt.width,), 1.0 - opt.plus))
        self.shift = nn.Parameter(torch.zeros(width or opt.width)) if opt.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps)
        x = x * (self.scale + self.plus) if self.plus else x * self.scale
        return x if self.shift is None else x + self.shift


def norm_of(opt: Opt, style: str) -> nn.Module:
    """The norm of a style: of PyTorch where it has one."""
    if style != "fused" or opt.plus:
        return Norm(opt)
    if opt.norm == "ln":
        return nn.LayerNorm(opt.width, eps=opt.eps, bias=opt.norm_bias)
    return nn.RMSNorm(opt.width, eps=opt.eps)


def slopes_of(kind: str, heads: int) -> Tensor:
    """ALiBi's slopes of the heads."""
    near = 2 ** math.floor(math.log2(heads))
    if kind == "plain" or (near == heads and kind in ("closest", "next")):
        return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
    if kind == "late":
        return torch.tensor([2.0 ** (-8 * h / heads) for h in range(heads)])
    if kind == "next":
        all_of = [2.0 ** (-8 * (h + 1) / (2 * near)) for h in range(2 * near)]
        return torch.tensor((all_of[1::2] + all_of[::2])[:heads])
    first = [2.0 ** (-8 * (h + 1) / near) for h in range(near)]
    return torch.tensor(first + [2.0 ** (-4 * (2 * h + 1) / near) for h in range(heads - near)])


class Mixer(nn.Module):
    """The part of attention between its projections, on (B, T, H, d)."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.opt = opt
        if opt.turned:
            rates = 1.0 / (opt.base ** (torch.arange(0, opt.turned, 2).float() / opt.turned))
            self.register_buffer("rates", rates, persistent=False)
        if opt.slopes:
            self.register_buffer("slopes", slopes_of(opt.slopes, opt.heads), persistent=False)
        if opt.qk:
            own = replace(opt, norm_bias=False)
            self.q_norm, self.k_norm = Norm(own, opt.size), Norm(own, opt.size)

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the first features of (B, T, H, d)."""
        rates, opt = self.get_buffer("rates"), self.opt
        angles = torch.arange(x.shape[1], dtype=rates.dtype)[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        part, rest = x[..., : opt.turned], x[..., opt.turned :]
        if opt.pairs:
            a, b = part[..., 0::2], part[..., 1::2]
            part = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = part[..., : opt.turned // 2], part[..., opt.turned // 2 :]
            part = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((part, rest), -1)

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        opt = self.opt
        if opt.qk == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if opt.turned:
            q, k = self.turn(q), self.turn(k)
        if opt.qk == "late":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def shown(self, length: int) -> Tensor:
        """Keys that a query sees, (T, T)."""
        gap = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = {"causal": gap >= 0, "none": gap >= -length, "flipped": gap <= 0}[self.opt.mask]
        return seen if self.opt.window is None else seen & (gap < self.opt.window)

    def bias(self, length: int) -> Tensor:
        """Mask and ALiBi as numbers, (H or 1, T, T)."""
        seen = self.shown(length)
        zeros = torch.zeros((1, length, length))
        if self.opt.slopes:
            slopes = self.get_buffer("slopes")
            gap = torch.arange(length)[None] - torch.arange(length)[:, None]
            zeros = slopes[:, None, None] * gap.to(slopes.dtype)
        return zeros.masked_fill(~seen, -math.inf)

    @property
    def factor(self) -> float:
        return self.opt.size**-0.5 if self.opt.scale is None else self.opt.scale

    def spread(self, x: Tensor) -> Tensor:
        """Keys or values for all query heads, (B, T, H, d)."""
        copies = self.opt.heads // self.opt.kv
        if copies == 1:
            return x
        return x.repeat(1, 1, copies, 1) if self.opt.tile else x.repeat_interleave(copies, 2)


class Fused(Mixer):
    """Queries, keys and values of each group in one matrix; PyTorch's function."""

    def __init__(self, opt: Opt):
        super().__init__(opt)
        rows = (opt.heads + 2 * opt.kv) * opt.size
        self.attn = nn.Linear(opt.width, rows, bias=opt.qkv_bias)
        self.proj = nn.Linear(opt.heads * opt.size, opt.width, bias=opt.o_bias)

    def forward(self, x: Tensor) -> Tensor:
        opt = self.opt
        each = opt.heads // opt.kv
        groups = self.attn(x).view(*x.shape[:2], opt.kv, each + 2, opt.size)
        q, k, v = groups.split((each, 1, 1), 3)
        q, k = self.prepared(q.flatten(2, 3), k.flatten(2, 3))
        k, v = self.spread(k), self.spread(v.flatten(2, 3))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if opt.cap is not None:
            logits = (q @ k.mT * self.factor / opt.cap).tanh() * opt.cap
            y = (logits + self.bias(x.shape[1]).to(q.dtype)).softmax(-1) @ v
        else:
            seen = self.bias(x.shape[1]).to(q.dtype)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.factor, dropout_p=opt.drop)
        return self.proj(y.transpose(1, 2).flatten(2))


class Einsum(Mixer):
    """Kernels (width, heads, size), grouped keys without copies."""

    def __init__(self, opt: Opt):
        super().__init__(opt)
        for name, heads in (("query", opt.heads), ("key", opt.kv), ("value", opt.kv)):
            setattr(self, name, nn.Parameter(torch.zeros(opt.width, heads, opt.size)))
            if opt.qkv_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(heads, opt.size)))
        self.out = nn.Parameter(torch.zeros(opt.heads, opt.size, opt.width))
        self.out_bias = nn.Parameter(torch.zeros(opt.width)) if opt.o_bias else None

    def project(self, x: Tensor, name: str) -> Tensor:
        y = torch.einsum("btd,dhk->bthk", x, self.get_parameter(name))
        return y + self.get_parameter(f"{name}_bias") if self.opt.qkv_bias else y

    def forward(self, x: Tensor) -> Tensor:
        opt = self.opt
        q, k, v = (self.project(x, name) for name in ("query", "key", "value"))
        q, k = self.prepared(q, k)
        q = q.unflatten(2, (-1, opt.kv)).transpose(2, 3) if opt.tile else q.unflatten(2, (opt.kv, -1))
        logits = torch.einsum("btgrk,bsgk->bgrts", q * self.factor, k)
        bias = self.bias(x.shape[1]).to(x.dtype)
        bias = bias[:, None] if len(bias) == 1 else bias.unflatten(0, (opt.kv, -1))
        weights = F.dropout((logits + bias).softmax(-1), opt.drop)
        y = torch.einsum("bgrts,bsgk->btgrk", weights, v)
        y = (y.transpose(2, 3) if opt.tile else y).flatten(2, 3)
        y = torch.einsum("bthk,hkd->btd", y, self.out)
        return y if self.out_bias is None else y + self.out_bias


class Split(Mixer):
    """Three projections; logits and softmax written out; keys are expanded, not copied."""

    def __init__(self, opt: Opt):
        super().__init__(opt)
        self.q_lin = nn.Linear(opt.width, opt.heads * opt.size, bias=opt.qkv_bias)
        self.k_lin = nn.Linear(opt.width, opt.kv * opt.size, bias=opt.qkv_bias)
        self.v_lin = nn.Linear(opt.width, opt.kv * opt.size, bias=opt.qkv_bias)
        self.out_lin = nn.Linear(opt.heads * opt.size, opt.width, bias=opt.o_bias)

    def spread(self, x: Tensor) -> Tensor:
        if self.opt.tile:
            return super().spread(x)
        copies = self.opt.heads // self.opt.kv
        return x[:, :, :, None].expand(-1, -1, -1, copies, -1).reshape(*x.shape[:2], -1, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        opt = self.opt
        batch, length, _ = x.shape
        q = self.q_lin(x).view(batch, length, opt.heads, opt.size)
        k = self.k_lin(x).view(batch, length, opt.kv, opt.size)
        v = self.v_lin(x).view(batch, length, opt.kv, opt.size)
        q, k = self.prepared(q, k)
        q, k, v = (
            q.permute(0, 2, 1, 3),
            self.spread(k).permute(0, 2, 3, 1),
            self.spread(v).permute(0, 2, 1, 3),
        )
        scores = torch.matmul(q, k) * self.factor
        if opt.cap is not None:
            scores = opt.cap * torch.tanh(scores / opt.cap)
        scores = scores + self.bias(length).to(scores.dtype)
        weights = F.dropout(F.softmax(scores, dim=-1), opt.drop)
        y = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(batch, length, -1)
        return self.out_lin(y)
