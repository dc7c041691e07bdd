"""Tests that parts that could not be read are reported, and their stacks are not complete."""

import pytest
import torch
import torch.nn.functional as F
from handwritten_base import VOCABULARY, WIDTH, Attention, Block, FeedForward, Tower, token_ids
from test_anatomy_opaque import mystery
from torch import Tensor, nn

from normscope.anatomy import assemble, read_anatomy
from normscope.report import text_anatomy


class Skipless(Block):
    """A block in the middle of a stack whose attention is not added to the stream."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm1(x))


class Straight(Block):
    """A block that only maps its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.norm2(x))


class Hidden(nn.Module):
    """A feed-forward with an opaque op."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = FeedForward(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(mystery(x, self.gain))


class Pair(nn.Module):
    """An encoder and a decoder of torch, the encoder's feed-forward opaque or not."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(None, Hidden() if hidden else None) for _ in range(2))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.ends = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(target)
        for block in self.encoder:
            memory = block(memory)
        memory = self.ends[0](memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.ends[1](x)


@pytest.mark.parametrize("middle", [Skipless, Straight])
def test_a_block_without_a_skip_between_others_is_said(middle: type[Block]) -> None:
    anatomy = read_anatomy(Tower(Block(), middle(), Block()), token_ids())
    assert any("is in no residual sum" in line for line in anatomy.unread)
    assert not any(stack.complete for stack in anatomy.stacks)
    assert [block.path for block in anatomy.blocks] == ["blocks.0", "blocks.2"]


def test_a_gap_in_the_encoder_leaves_the_decoder_complete() -> None:
    ids = torch.randint(0, VOCABULARY, (2, 6)), torch.randint(0, VOCABULARY, (2, 5))
    hidden, whole = (read_anatomy(Pair(hidden), ids) for hidden in (True, False))
    assert [stack.name for stack in hidden.stacks] == ["encoder", "decoder"]
    assert [stack.complete for stack in hidden.stacks] == [False, True]
    assert [stack.complete for stack in whole.stacks] == [True, True]
    assert [stack["complete"] for stack in hidden.to_dict()["stacks"]] == [False, True]


def test_a_gap_before_a_stack_is_every_stack_s() -> None:
    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.tower = Attention(), Tower(Block(), Block())

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tower.tokens(ids)
            return self.tower.final(self.tower.run(x + self.front(F.layer_norm(x, (WIDTH,)))))

    anatomy = read_anatomy(Front(), token_ids())
    assert any("outside any repeated module" in line for line in anatomy.unread)
    assert [stack.complete for stack in anatomy.stacks] == [False]
    assert "encoder: 2 blocks (partly read), final norm" in text_anatomy(anatomy)


def test_a_rule_that_breaks_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(assemble, "find_attentions", broken)
    anatomy = read_anatomy(Tower(Block()), token_ids())
    assert anatomy.stacks == ()
    (line,) = anatomy.unread
    assert "broken (test_anatomy_gaps.py:" in line
    assert "IndexError: tuple index out of range" in line


class WithTangent(nn.Module):
    """A block whose branch adds its own directional derivative (forward-mode AD makes zero tensors)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(lambda z: self.linear(self.norm(z)), (x,), (torch.ones_like(x),))
        return x + value + 0.1 * tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, within its jvp rules
def test_a_forward_that_takes_a_jvp_ends_in_no_traceback() -> None:
    anatomy = read_anatomy(nn.Sequential(WithTangent(), WithTangent()), torch.randn(2, 5, 16))
    assert anatomy.unread, "the norm under forward-mode AD is not seen through"


class DifferenceOfNorms(Block):
    """x + c·(N(x) + F(x) − N(x)) as in RepMixer, then a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.taken = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.scale, self.mixer = nn.Parameter(torch.full((WIDTH,), 1e-5)), Summed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * (self.mixer(x) - self.taken(x))
        return x + self.feed_forward(self.norm2(x))


class Summed(nn.Module):
    """N(x) + F(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x) + self.norm(x)


def test_a_sum_inside_a_branch_is_not_the_stream() -> None:
    found = read_anatomy(Tower(DifferenceOfNorms(), DifferenceOfNorms()), token_ids())
    (stack,) = found.stacks
    assert not stack.long_skips
    for block in stack.blocks:
        mixer, feed_forward = block.branches
        assert not mixer.sum.module.endswith("mixer"), "the outer sum, not the inner one"
        assert (mixer.stream_scale, feed_forward.stream_scale) == ("learnt", None)
        assert feed_forward.placement == "pre"
    assert all("with and without a norm" in words for words in found.unread)
