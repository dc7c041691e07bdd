"""Attention and feed-forward written in many ways."""

import math

import torch
import torch.nn.functional as F
from handwritten_base import HEADS, PRE, WIDTH, Attention, Block, FeedForward, case, pre_tower, reading
from torch import Tensor, nn


class SoftmaxAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.full(logits.shape[-2:], float("-inf")).triu(1)
        return torch.softmax(logits + mask, dim=-1) @ v


class EinsumAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k).tril()
        return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), v)


class LinearAttention(Attention):
    """No softmax: φ(q)(φ(k)ᵀv)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6)


class RotaryAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = (
            torch.arange(q.shape[-2])[:, None]
            * torch.tensor([1.0, 0.1]).repeat(2, 2).flatten()[: q.shape[-1]]
        )

        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)


class QKNormAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (F.layer_norm(x, x.shape[-1:]) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v)


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class TanhGELU(nn.Module):
    """GELU's tanh form written out: an add of x and a function of x, but no residual."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def written_out_gelu() -> nn.Sequential:
    """A feed-forward around it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), TanhGELU(), nn.Linear(WIDTH, WIDTH))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PointwiseConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)


class Mixture(nn.Module):
    """Top-1 routing with a Python loop and index_add: which experts run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(FeedForward() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if rows.numel():
                out.index_add_(0, rows, weight[rows, None] * expert(tokens[rows]))
        return out.view_as(x)


class TokenMixing(nn.Module):
    """MLP-Mixer's: a feed-forward across the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = FeedForward(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(1, 2)).transpose(1, 2)


for attention in (
    SoftmaxAttention,
    EinsumAttention,
    LinearAttention,
    RotaryAttention,
    QKNormAttention,
    TorchAttention,
):
    case(attention.__name__, lambda a=attention: pre_tower(lambda: Block(a())), PRE)
for feed_forward in (SwiGLU, PointwiseConvolution, Mixture):
    case(feed_forward.__name__, lambda f=feed_forward: pre_tower(lambda: Block(None, f())), PRE)
case("TanhGELU", lambda: pre_tower(lambda: Block(None, written_out_gelu())), PRE)
case("mixer", lambda: pre_tower(lambda: Block(TokenMixing())), reading("O.pre F.pre"))
case("attention-only", lambda: pre_tower(AttentionOnly), reading("A.pre"))


class AttentionOnly(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x))
