"""Small decoders written in several ways, with one change each, and what a comparison says of two of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.compare.align import align
from normscope.compare.structure import compare_structures, read_for_structure, structure_of
from normscope.compare.types import Difference, Place
from normscope.subjects import make_subject

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 67, 32, 4, 3, 24

Init = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Options:
    """Description of a decoder; each field is one thing that a difference can be in."""

    depth: int = DEPTH
    heads: int = HEADS
    eps: float = 1e-5
    bias: bool = True
    activation: str = "gelu"
    scale: float | None = None
    cap: float | None = None
    rotary: str = ""
    base: float = 10_000.0
    window: int = 0
    causal: bool = True
    own: bool = True
    dropout: float = 0.0
    tied: bool = True
    final_norm: bool = True
    embedding_scale: float = 1.0
    positions: bool = True
    branch_scale: float = 1.0
    hidden: int = 4 * WIDTH
    post: bool = False
    rms: bool = False


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def norm(o: Options) -> nn.Module:
    return nn.RMSNorm(WIDTH, o.eps) if o.rms else nn.LayerNorm(WIDTH, o.eps)


def turned(x: Tensor, o: Options) -> Tensor:
    """Rotary positions on (B, H, T, K)."""
    k = x.shape[-1]
    angle = torch.arange(x.shape[-2])[:, None] * o.base ** (-torch.arange(0, k, 2) / k)
    cos, sin = angle.cos(), angle.sin()
    if o.rotary == "halves":
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def mask(t: int, o: Options) -> Tensor:
    away = torch.arange(t)[:, None] - torch.arange(t)
    seen = away >= (0 if o.own else 1) if o.causal else torch.ones(t, t, dtype=torch.bool)
    seen[0, 0] = True
    return seen & (away < o.window) if o.window else seen


class Attention(nn.Module):
    """Separate maps and a softmax written out."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=o.bias) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=o.bias)
        self.drop_weights, self.drop = nn.Dropout(o.dropout), nn.Dropout(o.dropout)

    def forward(self, x: Tensor) -> Tensor:
        o = self.o
        q, k, v = (
            f(x).unflatten(-1, (o.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        if o.rotary:
            q, k = turned(q, o), turned(k, o)
        scale = o.scale or q.shape[-1] ** -0.5
        logits = q @ k.transpose(-1, -2) * scale
        if o.cap:
            logits = o.cap * torch.tanh(logits / o.cap)
        logits = logits.masked_fill(~mask(x.shape[1], o), -math.inf)
        y = self.drop_weights(logits.softmax(-1)) @ v
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))


class FusedAttention(nn.Module):
    """One map for q, k and v, the scale on the queries, PyTorch's attention where it can do the same."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, self.attn_dropout = o, o.dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=o.bias)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=o.bias)

    def forward(self, x: Tensor) -> Tensor:
        o, (b, t, _) = self.o, x.shape
        q, k, v = self.qkv(x).view(b, t, 3, o.heads, -1).permute(2, 0, 3, 1, 4)
        if o.rotary:
            q, k = turned(q, o), turned(k, o)
        scale = o.scale or q.shape[-1] ** -0.5
        if o.cap:
            logits = o.cap * torch.tanh((scale * q) @ k.mT / o.cap)
            y = (logits + torch.where(mask(t, o), 0.0, -1e9)).softmax(-1) @ v
        else:
            p = self.attn_dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(t, o), scale=scale, dropout_p=p)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, t, -1)), o.dropout, self.training)


class FeedForward(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.up, self.down = nn.Linear(WIDTH, o.hidden, bias=o.bias), nn.Linear(o.hidden, WIDTH, bias=o.bias)
        self.drop = nn.Dropout(o.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(ACTIVATIONS[self.o.activation](self.up(x))))


class Block(nn.Module):
    def __init__(self, o: Options, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.o = o
        self.ln1, self.ln2 = norm(o), norm(o)
        self.attn, self.mlp = attention(o), FeedForward(o)

    def forward(self, x: Tensor) -> Tensor:
        s = self.o.branch_scale
        if self.o.post:
            x = self.ln1(x + s * self.attn(x))
            return self.ln2(x + s * self.mlp(x))
        x = x + s * self.attn(self.ln1(x))
        return x + s * self.mlp(self.ln2(x))


class Plain(nn.Module):
    """The decoder as most people write it."""

    attention: type[nn.Module] = Attention

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH) if o.positions else None
        self.layers = nn.ModuleList(Block(o, self.attention) for _ in range(o.depth))
        self.norm = norm(o) if o.final_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if o.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.o.embedding_scale
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        x = F.dropout(x, self.o.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Fused(Plain):
    """The same with fused projections."""

    attention = FusedAttention


class Flat(nn.Module):
    """The same as a flat list of sublayers, with positions as a parameter and the head as a function."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.wte = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.wpe = nn.Parameter(torch.randn(1, 64, WIDTH)) if o.positions else None
        self.norms = nn.ModuleList(norm(o) for _ in range(2 * o.depth))
        self.sublayers = nn.ModuleList(
            (FusedAttention if n % 2 == 0 else FeedForward)(o) for n in range(2 * o.depth)
        )
        self.ln_f = norm(o) if o.final_norm else None
        self.unembed = None if o.tied else nn.Parameter(torch.randn(WIDTH, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.wte)
        x = self.o.embedding_scale * x if self.o.embedding_scale != 1 else x
        if self.wpe is not None:
            x = x + self.wpe[:, : ids.shape[1]]
        x = F.dropout(x, self.o.dropout, self.training)
        for sublayer, its_norm in zip(self.sublayers, self.norms, strict=True):
            if self.o.post:
                x = its_norm(torch.add(x, sublayer(x), alpha=self.o.branch_scale))
            else:
                x = torch.add(x, sublayer(its_norm(x)), alpha=self.o.branch_scale)
        x = x if self.ln_f is None else self.ln_f(x)
        return x @ (self.wte.T if self.unembed is None else self.unembed)


class TorchAttention(nn.Module):
    """PyTorch's module."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.inner = nn.MultiheadAttention(WIDTH, o.heads, o.dropout, o.bias, batch_first=True)
        self.drop = nn.Dropout(o.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ~mask(x.shape[1], self.o)
        return self.drop(self.inner(x, x, x, attn_mask=hidden, need_weights=False)[0])


class Loops(nn.Module):
    """A module for each head, as tutorials write it."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, k = o, WIDTH // o.heads
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, k, bias=o.bias) for _ in range(3)) for _ in range(o.heads)
        )
        self.mix = nn.Linear(WIDTH, WIDTH, bias=o.bias)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for head in self.heads:
            q, k, v = (f(x) for f in head)
            logits = q @ k.mT * q.shape[-1] ** -0.5
            found.append(logits.masked_fill(~mask(x.shape[1], self.o), -math.inf).softmax(-1) @ v)
        return self.mix(torch.cat(found, -1))


class Einsums(nn.Module):
    """GPT-NeoX's order of heads and q, k, v, in bare parameters and einsum."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.wqkv = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) * 0.1)
        self.bqkv = nn.Parameter(torch.zeros(3 * WIDTH))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        fused = torch.einsum("btd,de->bte", x, self.wqkv) + self.bqkv
        q, k, v = fused.view(b, t, self.o.heads, 3, -1).unbind(3)
        logits = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        logits = logits + torch.triu(torch.full((t, t), -math.inf), 1)
        return self.proj(torch.einsum("bhts,bshd->bthd", logits.softmax(-1), v).flatten(2))


class Complex(nn.Module):
    """Rotary positions by complex numbers from a buffer, as in Meta's LLaMA."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, k = o, WIDTH // o.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        angle = torch.outer(torch.arange(64.0), o.base ** (-torch.arange(0, k, 2) / k))
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        assert isinstance(self.turns, Tensor)
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, self.o.heads, -1) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (self.turn(q), self.turn(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Functions(nn.Module):
    """The decoder in one module, whose output biases are added after the residual sums."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.tokens, self.where = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        shapes = {
            "wq": (WIDTH, WIDTH),
            "wk": (WIDTH, WIDTH),
            "wv": (WIDTH, WIDTH),
            "wo": (WIDTH, WIDTH),
            "wu": (WIDTH, o.hidden),
            "wd": (o.hidden, WIDTH),
        }
        for n in range(o.depth):
            for name, shape in shapes.items():
                self.register_parameter(f"{name}{n}", nn.Parameter(torch.randn(shape) * 0.1))
                self.register_parameter(f"b{name}{n}", nn.Parameter(torch.zeros(shape[1])))
        self.norms = nn.ModuleList(norm(o) for _ in range(2 * o.depth + 1))

    def forward(self, ids: Tensor) -> Tensor:
        o, (b, t) = self.o, ids.shape
        x = self.tokens(ids) + self.where(torch.arange(t))
        for n in range(o.depth):
            w = {name[:-1]: p for name, p in self.named_parameters() if name.endswith(str(n))}
            x, h = self.normed(x, n)
            q, k, v = ((h @ w[f"w{i}"] + w[f"bw{i}"]).view(b, t, o.heads, -1).transpose(1, 2) for i in "qkv")
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(b, t, -1) @ w["wo"] + w["bwo"]
            h = self.norms[2 * n + 1](x)
            x = x + F.gelu(h @ w["wu"] + w["bwu"]) @ w["wd"] + w["bwd"]
        return self.norms[-1](x) @ self.tokens.weight.T

    def normed(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The residual around an attention, and what it reads."""
        return x, self.norms[2 * n](x)


def with_attention(kind: type[nn.Module], options: Options) -> nn.Module:
    """The plain decoder with another attention."""
    return type("Other", (Plain,), {"attention": kind})(options)


class TorchLayers(nn.Module):
    """PyTorch's encoder layers under a causal mask."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.tokens, self.where = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, o.heads, o.hidden, o.dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(layer, o.depth, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        hidden = nn.Transformer.generate_square_subsequent_mask(t)
        x = self.tokens(ids) + self.where(torch.arange(t))
        return self.stack(x, mask=hidden, is_causal=True) @ self.tokens.weight.T


WAYS: dict[str, type[nn.Module]] = {"plain": Plain, "fused": Fused, "flat": Flat}


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def place_of(model: nn.Module, inputs: Any = None) -> Place:
    subject = make_subject(model, batch() if inputs is None else inputs)
    place = structure_of(subject, read_for_structure(subject))
    assert "unread" not in place.facts, place.facts["unread"]
    return place


def made(way: str, options: Options, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return WAYS[way](options)


def differences(a: nn.Module, b: nn.Module) -> tuple[Difference, ...]:
    return compare_structures(align(place_of(a), place_of(b)))
