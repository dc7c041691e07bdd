"""Structures around the blocks: wrappers, outputs, layouts, encoder-decoders, odd containers."""

from collections.abc import Callable
from typing import Any

import torch
from handwritten_base import (
    HEADS,
    POST,
    PRE,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    FeedForward,
    Tower,
    case,
    pre_tower,
    reading,
)
from readings import stack
from torch import Tensor, nn


class Wrapper(nn.Module):
    """A wrapper that holds its model as DataParallel does."""

    def __init__(self, module: nn.Module, wrap: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.module, self.wrap = module, wrap

    def forward(self, ids: Tensor) -> Any:
        return self.wrap(self.module(ids))


class SequenceFirst(Tower):
    """(T, B, d) inside, as nn.Transformer's default."""

    def run(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)


class SequenceFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class TiedHead(Tower):
    def forward(self, ids: Tensor) -> Tensor:
        return self.final(self.run(self.tokens(ids))) @ self.tokens.weight.T


class Shared(Tower):
    """ALBERT: one module, three calls."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return x


class FlatList(Tower):
    """[attention, feed-forward, attention, feed-forward] with the adds in the tower itself."""

    def __init__(self) -> None:
        super().__init__(Attention(), FeedForward(), Attention(), FeedForward())
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for norm, branch in zip(self.norms, self.blocks, strict=True):
            x = x + branch(norm(x))
        return x


class ResidualWrapper(nn.Module):
    """lucidrains' PreNorm/Residual style: a module around every branch does the add."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.fn, self.norm = branch, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x)) + x


class LongSkips(Tower):
    """A U-net: the last half adds the outputs of the first half."""

    def run(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.blocks[:2]:
            x = block(x)
            skips.append(x)
        for block in self.blocks[2:]:
            x = block(x + skips.pop())
        return x


class Nested(Block):
    """A residual inside a branch of the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.inner, self.inner_norm = FeedForward(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.narrow(self.norm2(x))
        y = y + self.inner(self.inner_norm(y))
        return x + self.widen(y)


class ConvolutionBehind(Block):
    """Each branch ends in a short convolution with a residual of its own: x + (a + conv(a))."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention(self.norm1(x))
        x = x + (a + self.conv1(a.transpose(1, 2)).transpose(1, 2))
        b = self.feed_forward(self.norm2(x))
        return x + (b + self.conv2(b.transpose(1, 2)).transpose(1, 2))


class TwoStreams(Tower):
    """Pegasus-X: a few global tokens have their own stream in the same blocks and feed-forwards."""

    def run(self, x: Tensor) -> Tensor:
        g = self.positions.weight[None, :2].expand(len(x), -1, -1)
        for block in self.blocks:
            y, h = block.norm1(x), block.norm1(g)
            x, g = x + block.attention(y, torch.cat([h, y], 1)), g + block.attention(h, y)
            x, g = x + block.feed_forward(block.norm2(x)), g + block.feed_forward(block.norm2(g))
        return torch.cat([g, x], 1)


class EncoderDecoder(nn.Module):
    """Post- or Pre-LN halves from torch's own layers, with token embeddings."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Transformer(
            WIDTH, HEADS, 2, 2, 2 * WIDTH, batch_first=True, norm_first=norm_first, dropout=0.0
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(self.embed(source), self.embed(target))


class CrossBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cross, self.norm3 = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm3(x), memory)
        return x + self.feed_forward(self.norm2(x))


class HandEncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.reader, self.writer = (
            nn.ModuleList([Block(), Block()]),
            nn.ModuleList([CrossBlock(), CrossBlock()]),
        )
        self.reader_norm, self.writer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(target)
        for block in self.reader:
            memory = block(memory)
        memory = self.reader_norm(memory)
        for block in self.writer:
            x = block(x, memory)
        return self.writer_norm(x)


class Patches(Tower):
    """A vision model: patches by a convolution, a class token, the head on that token alone."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.patch, self.cls = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.head(self.final(self.run(x + self.positions.weight[: x.shape[1]]))[:, 0])


class TorchEncoder(nn.Module):
    """torch.nn.TransformerEncoder as it is usually called, with a causal mask."""

    def __init__(self, norm_first: bool, final: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(WIDTH) if final else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embed(ids), mask=mask, is_causal=True))


def oddly_named() -> nn.Module:
    """A model whose module names are meaningless or misleading."""
    model = pre_tower(Block)
    for block in model.blocks:
        block.mlp = block.attention
        block.self_attn = block.feed_forward
    return model


def pair_of_ids() -> tuple[Tensor, Tensor]:
    """A source and a target of different lengths."""
    return torch.randint(0, VOCABULARY, (2, 8)), torch.randint(0, VOCABULARY, (2, 6))


case("wrapped", lambda: Wrapper(pre_tower(Block)), PRE)
case("output-dict", lambda: Wrapper(pre_tower(Block), lambda out: {"logits": out, "none": None}), PRE)
case("output-tuple", lambda: Wrapper(pre_tower(Block), lambda out: (out, [out.sum()])), PRE)
case(
    "output-two-losses", lambda: Wrapper(pre_tower(Block), lambda out: (out.mean(), out.square().mean())), PRE
)
case("output-nan", lambda: Wrapper(pre_tower(Block), lambda out: out * float("nan")), PRE)
case("sequence-first", lambda: SequenceFirst(*(Block(SequenceFirstAttention()) for _ in range(2))), PRE)
case("tied-head", lambda: TiedHead(Block(), Block()), PRE)
case("shared", lambda: Shared(Block()), reading("A.pre F.pre", n=3))
case("flat-list", FlatList, PRE)
case(
    "residual-wrappers",
    lambda: Tower(
        *(nn.Sequential(ResidualWrapper(Attention()), ResidualWrapper(FeedForward())) for _ in range(2))
    ),
    PRE,
)
case(
    "residual-wrappers-flat",
    lambda: Tower(
        *(ResidualWrapper(branch()) for branch in (Attention, FeedForward, Attention, FeedForward))
    ),
    PRE,
)
case("long-skips", lambda: LongSkips(*(Block() for _ in range(4))), reading("A.pre F.pre", n=4))
case("convolution-behind", lambda: pre_tower(ConvolutionBehind), reading("A.pre O.pre"), unread=None)
case("two-streams", lambda: TwoStreams(Block(), Block()), unread=True)
case("nested", lambda: pre_tower(Nested), unread=True)
case(
    "nn.Transformer-post",
    lambda: EncoderDecoder(False),
    # nn.Transformer adds another norm after each stack, Post-LN or not
    stack(*2 * ["A.post F.post"], final=True),
    stack(*2 * ["A.post X.post F.post"], final=True),
    batch=pair_of_ids,
)
PRE_PAIR = (PRE, stack(*2 * ["A.pre X.pre F.pre"], final=True))
case("nn.Transformer-pre", lambda: EncoderDecoder(True), *PRE_PAIR, batch=pair_of_ids)
case("encoder-decoder", HandEncoderDecoder, *PRE_PAIR, batch=pair_of_ids)
case("patches", Patches, PRE, batch=lambda: torch.randn(2, 3, 8, 8))
case("nn.TransformerEncoder-post", lambda: TorchEncoder(False, False), POST)
case("nn.TransformerEncoder-post-norm", lambda: TorchEncoder(False, True), reading("A.post F.post"))
case("nn.TransformerEncoder-pre", lambda: TorchEncoder(True, True), PRE)
case(
    "nn.TransformerEncoder-pre-no-final",
    lambda: TorchEncoder(True, False),
    reading("A.pre F.pre", final=False),
)
case("odd-names", oddly_named, PRE)
