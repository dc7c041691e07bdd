"""Handwritten models: many ways to write a residual stream, each with its expected reading."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from readings import StackReading, stack
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 16, 2, 32


@dataclass(frozen=True)
class Case:
    """A model and its reading; see `hf_models.HFModel` for the fields they share.

    Attributes:
        schemes: all names its branches carry; None is not compared.
    """

    name: str
    build: Callable[[], nn.Module]
    stacks: tuple[StackReading, ...]
    batch: Callable[[], Any]
    unread: bool | None = False
    scheme: str | None = None
    schemes: set[str | None] | None = None


CASES: list[Case] = []


def token_ids() -> Tensor:
    """Two sequences of eight tokens."""
    return torch.randint(0, VOCABULARY, (2, 8))


def case(name: str, build: Callable[[], nn.Module], *stacks: StackReading, **more: Any) -> None:
    """Add a row to the table."""
    CASES.append(Case(name, build, stacks, more.pop("batch", token_ids), **more))


class Attention(nn.Module):
    """Plain multi-head attention; `memory` makes it cross-attention."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (self.heads(p(y)) for p, y in ((self.q, x), (self.k, memory), (self.v, memory)))
        return self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class FeedForward(nn.Sequential):
    """Linear, GELU, linear."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """Parts of one block; a case joins them in its `forward`. Pre-LN by default."""

    def __init__(self, attention: nn.Module | None = None, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention or Attention(), feed_forward or FeedForward()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(self.norm1(x)))
        return self.join(x, self.feed_forward(self.norm2(x)))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Tower(nn.Module):
    """Embeddings with positions, blocks, final norm, head."""

    def __init__(self, *blocks: nn.Module, final: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.final = final or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.final(self.run(x)))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower(block: Callable[[], nn.Module], final: Callable[[], nn.Module] = nn.Identity, n: int = 2) -> Tower:
    """`n` blocks of one kind."""
    return Tower(*(block() for _ in range(n)), final=final())


def pre_tower(block: Callable[[], nn.Module], n: int = 2) -> Tower:
    """`n` blocks under a final LayerNorm."""
    return tower(block, lambda: nn.LayerNorm(WIDTH), n)


PRE, POST = stack(*2 * ["A.pre F.pre"], final=True), stack(*2 * ["A.post F.post"], final=False)
NONE = stack(*2 * ["A.none F.none"], norm="none", final=False)


def reading(
    block: str, n: int = 2, norm: str = "layernorm", final: bool = True, **scales: Any
) -> StackReading:
    """`n` equal blocks."""
    return stack(*n * [block], norm=norm, final=final, **scales)
