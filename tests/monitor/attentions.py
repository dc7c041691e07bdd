"""Decoders with attentions written in many ways, each with its logits in float64 for reference."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    scaled_dot_product_attention,
    softmax,
)

HEADS, GROUPS, WIDTH, TOKENS, IDS, BATCH = 4, 2, 32, 24, 16, 4

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Output of an attention, of q, k, v (B, H or G, T, K) and the dropout rate."""


def earlier(device: Any = None) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).tril()


def padded() -> Tensor:
    """Boolean mask (B, 1, T, T) with padding, and one query that sees nothing."""
    mask = earlier().repeat(BATCH, 1, 1, 1)
    mask[0, ..., :5] = False
    mask[2, ..., 8, :] = False
    return mask


def repeated(k: Tensor) -> Tensor:
    return k.repeat_interleave(HEADS // k.shape[1], dim=1)


def added(mask: Tensor, low: float = -math.inf) -> Tensor:
    return torch.where(mask, 0.0, low)


def causal(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)


def grouped(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)


def bidirectional(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, dropout_p=p, scale=0.7)


def boolean(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=padded(), dropout_p=p)


def additive(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=bias(q), dropout_p=p)


def bias(q: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    slopes = 0.1 * torch.arange(1, HEADS + 1)
    alibi = -slopes[:, None, None] * (place[:, None] - place).abs()
    return (alibi + added(earlier(), -3e4)).to(q.dtype)


def eager(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    logits = q @ repeated(k).mT / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~earlier(), torch.finfo(logits.dtype).min)
    weights = softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
    return nn.functional.dropout(weights, p) @ repeated(v)


def by_group(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """Logits (B, G, H/G, T, S)."""
    q = q.unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("bgrtk,bgsk->bgrts", q, k) / math.sqrt(q.shape[-1]) + added(earlier(), -1e9)
    return torch.einsum("bgrts,bgsk->bgrtk", logits.softmax(4).to(v.dtype), v).flatten(1, 2)


def flat(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """Logits (B·H, T, S)."""
    q, k, v = (t.flatten(0, 1) for t in (q, repeated(k), repeated(v)))
    logits = torch.baddbmm(
        added(earlier(), -1e9).expand(len(q), -1, -1).to(q.dtype), q, k.mT, alpha=q.shape[-1] ** -0.5
    )
    return (torch.softmax(logits, 2) @ v).unflatten(0, (-1, HEADS))


def exact_logits(attend: Attend, q: Tensor, k: Tensor) -> Tensor:
    """Logits (B, H, T, S) in float64, −inf where masked."""
    scale = 0.7 if attend is bidirectional else q.shape[-1] ** -0.5
    logits = q.double() @ repeated(k).double().mT * scale
    if attend is additive:
        logits = logits + bias(q).double()
    mask = padded() if attend is boolean else earlier()
    return logits if attend is bidirectional else logits.masked_fill(~mask, -math.inf)


class SelfAttention(nn.Module):
    def __init__(self, attend: Attend, p: float, groups: int) -> None:
        super().__init__()
        self.num_heads, self.attend, self.p = HEADS, attend, p
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * groups) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.seen is not None:
            self.seen.append(exact_logits(self.attend, q.detach(), k.detach()))
        out = self.attend(q, k, v, self.p if self.training else 0.0)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(IDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(make()) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, IDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(attend: Attend, p: float = 0.0, groups: int = HEADS) -> Decoder:
    """A decoder whose logits are large enough to differ."""
    torch.manual_seed(0)
    model = Decoder(lambda: SelfAttention(attend, p, groups))
    with torch.no_grad():
        for block in model.blocks:
            for each in (block.attention.q, block.attention.k):
                each.weight.mul_(4)
    return model


def batches() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, IDS, (BATCH, TOKENS))


def loss_of(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    logits = model(ids)
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
