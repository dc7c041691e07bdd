"""Small Transformers written by hand, with every planted difference as an option; not the code under test."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Options:
    """Description of the models; the three bases are below."""

    style: str = "sdpa"  # sdpa, softmax, einsum, batched, folded, convolutions
    width: int = 32
    heads: int = 4
    kv_heads: int = 4
    depth: int = 2
    vocab: int = 64
    fused: bool = False
    norm: str = "layernorm"
    eps: float = 1e-5
    plus_one: bool = False
    placement: str = "pre"
    final_norm: bool = True
    rotary: str | None = None
    base: float = 10_000.0
    first: int = 0
    positions: bool = True
    position_offset: int = 0
    embedding_scale: float = 1.0
    activation: str = "gelu"
    gated: bool = False
    swapped: bool = False
    bias: bool = True
    o_bias: bool = True
    scale: float | None = None
    cap: float | None = None
    causal: bool = True
    window: int | None = None
    ahead: int = 0
    alibi: bool = False
    qk_norm: bool = False
    turned_first: bool = False
    extra_key: bool = False
    repeat: str = "repeat"
    split: str = "heads"
    merge: str = "heads"
    head_order: tuple[int, ...] | None = None
    branch_scale: float = 1.0
    stream_scale: float = 1.0
    residual: str = "stream"
    parallel: bool = False
    late_bias: bool = False
    dropout: float = 0.0
    output_scale: float = 1.0
    output_cap: float | None = None
    detach: str | None = None
    only: int | None = None  # the block that has the options; None is all


class Norm(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        self.kind, self.variance_epsilon, self.plus_one = o.norm, o.eps, o.plus_one
        self.weight = nn.Parameter(torch.zeros(o.width) if o.plus_one else torch.ones(o.width))
        self.bias = nn.Parameter(torch.zeros(o.width)) if o.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight if self.plus_one else self.weight
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], gain, self.bias, self.variance_epsilon)
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def turned(x: Tensor, o: Options) -> Tensor:
    """x (B, H, T, K) with rotary positions."""
    half = x.shape[-1] // 2
    place = torch.arange(x.shape[-2], dtype=torch.float64) + o.first
    angle = torch.outer(place, o.base ** (-torch.arange(half, dtype=torch.float64) / half)).to(x)
    if o.rotary == "halves":
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, self.k_width = o, o.width // o.heads
        kv = self.k_width * o.kv_heads
        if o.fused:
            self.qkv = nn.Linear(o.width, o.width + 2 * kv, bias=o.bias)
        else:
            self.q_proj = nn.Linear(o.width, o.width, bias=o.bias)
            self.k_proj, self.v_proj = (nn.Linear(o.width, kv, bias=o.bias) for _ in range(2))
        self.o_proj = nn.Linear(o.width, o.width, bias=o.o_bias)
        if o.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(self.k_width, eps=1e-6), nn.RMSNorm(self.k_width, eps=1e-6)

    def split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = width // self.k_width
        if self.o.split == "unmoved":
            return x.reshape(batch, heads, tokens, self.k_width)
        if self.o.split == "interleaved":
            return x.view(batch, tokens, self.k_width, heads).permute(0, 3, 1, 2)
        return x.view(batch, tokens, heads, self.k_width).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        o = self.o
        if o.fused:
            kv = self.k_width * o.kv_heads
            q, k, v = self.qkv(x).split([o.width, kv, kv], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = self.split(q), self.split(k), self.split(v)
        if o.qk_norm and not o.turned_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if o.rotary:
            q, k = turned(q, o), turned(k, o)
        if o.qk_norm and o.turned_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if o.kv_heads != o.heads:
            times = o.heads // o.kv_heads
            if o.repeat == "repeat":
                k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
            else:
                k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
        if o.detach == "k":
            k = k.detach()
        y = self.attend(q, k, v)
        batch, heads, tokens, features = y.shape
        if o.head_order is not None:
            y = y[:, list(o.head_order)]
        if o.merge == "unmoved":
            y = y.reshape(batch, tokens, heads * features)
        elif o.merge == "interleaved":
            y = y.permute(0, 2, 3, 1).flatten(2)
        else:
            y = y.transpose(1, 2).flatten(2)
        return F.linear(y, self.o_proj.weight) if o.late_bias else self.o_proj(y)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, tokens = self.o, q.shape[-2]
        scale = q.shape[-1] ** -0.5 if o.scale is None else o.scale
        back = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
        seen = back >= -o.ahead if o.causal else torch.ones(tokens, tokens, dtype=torch.bool)
        if o.window is not None:
            seen = seen & (back < o.window)
        plain = not (o.cap or o.alibi or o.extra_key)
        if o.style == "sdpa" and plain:
            is_plain = o.causal and not o.ahead and o.window is None
            mask = None if is_plain or bool(seen.all()) else seen
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_plain, scale=scale)
        if o.style == "einsum":
            logits = torch.einsum("bhtk,bhsk->bhts", q, k) * scale
        elif o.style in ("batched", "folded"):
            logits = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) * scale
            logits = logits.view(*q.shape[:3], tokens)
        else:
            logits = q @ k.transpose(-1, -2) * scale
        if o.cap:
            logits = torch.tanh(logits / o.cap) * o.cap
        if o.alibi:
            slopes = 2.0 ** (-torch.arange(1, o.heads + 1, dtype=logits.dtype))
            logits = logits - slopes[:, None, None] * back.abs().to(logits)
        logits = logits.masked_fill(~seen, float("-inf"))
        shape = logits.shape
        if o.style in ("batched", "folded"):
            logits = logits.flatten(0, 1 if o.style == "batched" else 2)
        if o.extra_key:
            p = F.softmax(torch.cat([logits, torch.zeros_like(logits[..., :1])], -1), -1)[..., :-1]
        else:
            p = F.softmax(logits, -1)
        p = p.reshape(shape)
        return torch.einsum("bhts,bhsk->bhtk", p, v) if o.style == "einsum" else p @ v


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared": lambda x: F.relu(x) ** 2,
}


class FeedForward(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, hidden = o, 2 * o.width
        self.up_proj = nn.Linear(o.width, hidden, bias=o.bias)
        if o.gated:
            self.gate_proj = nn.Linear(o.width, hidden, bias=o.bias)
        self.down_proj = nn.Linear(hidden, o.width, bias=o.o_bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.o.activation]
        if self.o.style == "convolutions" and not self.o.gated:
            up, down = self.up_proj, self.down_proj
            hidden = act(F.conv1d(x.transpose(1, 2), up.weight[..., None], up.bias))
            return F.conv1d(hidden, down.weight[..., None], down.bias).transpose(1, 2)
        if not self.o.gated:
            return self.down_proj(act(self.up_proj(x)))
        if self.o.swapped:
            return self.down_proj(act(self.up_proj(x)) * self.gate_proj(x))
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.norm1, self.attn = Norm(o), Attention(o)
        self.norm2, self.mlp = Norm(o), FeedForward(o)
        if o.placement == "peri":
            self.norm3, self.norm4 = Norm(o), Norm(o)

    def forward(self, x: Tensor) -> Tensor:
        outer = (self.norm3, self.norm4) if self.o.placement == "peri" else (None, None)
        if self.o.parallel:
            return self.parallel(x)
        x = self.join(x, self.attn, self.norm1, outer[0])
        return self.join(x, self.mlp, self.norm2, outer[1])

    def parallel(self, x: Tensor) -> Tensor:
        o = self.o
        y, z = self.norm1(x), self.norm2(x)
        if o.detach == "branch":
            y, z = y.detach(), z.detach()
        y = self.attn(y) * o.branch_scale
        if o.dropout:
            y = F.dropout(y, o.dropout, training=True)
        return (x.detach() if o.detach == "skip" else x) + y + self.mlp(z)

    def join(self, x: Tensor, branch: nn.Module, norm: nn.Module, outer: nn.Module | None) -> Tensor:
        o = self.o
        read = norm(x) if o.placement in ("pre", "peri") else x
        y = branch(read.detach() if o.detach == "branch" else read)
        if outer is not None:
            y = outer(y)
        if o.placement == "res-post":
            y = norm(y)
        if o.dropout:
            y = F.dropout(y, o.dropout, training=True)
        skip = read if o.residual == "norm" else x
        if o.detach == "skip":
            skip = skip.detach()
        if o.stream_scale != 1.0:
            skip = o.stream_scale * skip
        if o.branch_scale != 1.0:
            y = o.branch_scale * y
        x = skip + y
        if o.late_bias and isinstance(branch, Attention):
            x = x + branch.o_proj.bias
        return norm(x) if o.placement == "post" else x


class Tiny(nn.Module):
    """Token ids (B, T) → logits (B, T, vocab)."""

    def __init__(self, o: Options, plain: Options | None = None) -> None:
        super().__init__()
        self.o = o
        base = plain or o
        self.embed = nn.Embedding(o.vocab, o.width)
        self.pos = nn.Embedding(40, o.width) if o.positions else None
        changed = range(o.depth) if o.only is None else [o.only]
        self.blocks = nn.ModuleList(Block(o if i in changed else base) for i in range(o.depth))
        self.norm = Norm(o if o.only is None else base) if o.final_norm else None
        self.head = nn.Linear(o.width, o.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        o = self.o
        x = self.embed(ids) * o.embedding_scale if o.embedding_scale != 1.0 else self.embed(ids)
        if self.pos is not None:
            x = x + self.pos(torch.arange(ids.shape[1]) + o.position_offset)
        for block in self.blocks:
            x = block(x)
        x = x if self.norm is None else self.norm(x)
        logits = self.head(x)
        if o.output_cap:
            logits = o.output_cap * torch.tanh(logits / o.output_cap)
        return logits * o.output_scale if o.output_scale != 1.0 else logits


GPT = Options(fused=True)
LLAMA = Options(
    style="softmax",
    norm="rmsnorm",
    eps=1e-6,
    rotary="halves",
    positions=False,
    kv_heads=2,
    activation="silu",
    gated=True,
    bias=False,
    o_bias=False,
)
BERT = Options(style="einsum", causal=False, placement="post", final_norm=False, eps=1e-12)
PHI = replace(GPT, parallel=True)
BASES = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "phi": PHI}


def tiny(o: Options, changes: dict[str, Any] | None = None, seed: int = 0) -> Tiny:
    """A model with weights that hide nothing: no bias is zero, no gain one."""
    torch.manual_seed(seed)
    model = Tiny(replace(o, **(changes or {})), o)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    0.0, 1.0 if "embed" in name or "pos" in name else 1 / math.sqrt(parameter.shape[1])
                )
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def batch(o: Options, seed: int = 1) -> Tensor:
    """Token ids (2, 12)."""
    return torch.randint(o.vocab, (2, 12), generator=torch.Generator().manual_seed(seed))
