"""Tests of sums of two points of the stream: it continues from the later; the earlier is a long skip."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handwritten_base import VOCABULARY, WIDTH, Block, Tower, token_ids
from readings import lines_of, stack
from torch import Tensor, nn

from normscope.anatomy import Anatomy, capture, measuring, read_anatomy
from normscope.report import text_anatomy

PRE_RMS = "A.pre.rmsnorm F.pre.rmsnorm"


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class SmallBlock(nn.Module):
    """Pre-LN without weights in its norms, squared ReLU, a gated value embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.gate = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        x = x + self.attend(rms(x), value)
        return x + self.down(F.relu(self.up(rms(x))).square())

    def attend(self, x: Tensor, value: Tensor) -> Tensor:
        q, k = rms(self.q(x)) * 1.2, rms(self.k(x)) * 1.2
        v = self.v(x) + 3 * torch.sigmoid(self.gate(x[..., :4])) * value
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Speedrun(nn.Module):
    """The dataflow of today's small speed-run GPTs.

    A norm and a smear behind the embedding; before each block a learnt share of the stream and of the first
    embedding; behind the last block a share of the middle is taken out; a final norm without weights.
    """

    def __init__(self, depth: int, blended: range | None = None, two_sources: bool = False) -> None:
        super().__init__()
        self.two_sources = two_sources
        self.blended = range(depth) if blended is None else blended
        self.tokens, self.values = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(depth))
        self.keep, self.again = nn.Parameter(torch.ones(depth)), nn.Parameter(torch.full((depth,), 0.1))
        self.smear, self.out = nn.Linear(4, 1, bias=False), nn.Parameter(torch.tensor(0.2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = rms(self.tokens(ids))
        x = torch.cat([x[:, :1], x[:, 1:] + torch.sigmoid(self.smear(x[:, 1:, :4])) * x[:, :-1]], 1)
        first = x
        for index, block in enumerate(self.blocks):
            if index in self.blended:
                x = self.keep[index] * x + self.again[index] * first
            x = block(x, self.values(ids))
            if index == 0:
                second = x
            if self.two_sources and index == 1:
                first = second
            if index == len(self.blocks) // 2:
                middle = x
        return 15 * torch.tanh(self.head(rms(x - self.out * middle)) / 15)


class UNet(Tower):
    """The second half adds the outputs of the first half, each with its own share."""

    def __init__(self, depth: int, learnt: bool) -> None:
        super().__init__(*(Block() for _ in range(depth)))
        self.shares = nn.Parameter(torch.full((depth,), 0.5)) if learnt else depth * [0.5]

    def run(self, x: Tensor) -> Tensor:
        left: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            if index < len(self.blocks) // 2:
                left.append(x)
            else:
                x = x + self.shares[index] * left.pop()
            x = block(x)
        return x


class Dense(Tower):
    """DenseFormer: after each block, a learnt mean of all earlier states."""

    def __init__(self, depth: int) -> None:
        super().__init__(*(Block() for _ in range(depth)))
        self.shares = nn.Parameter(torch.eye(depth + 1) + 0.1)

    def run(self, x: Tensor) -> Tensor:
        seen = [x]
        for index, block in enumerate(self.blocks):
            seen.append(block(x))
            x = sum(self.shares[index, j] * y for j, y in enumerate(seen))  # type: ignore[assignment]
        return x


class Whole(Tower):
    """The embedding is added to the output of the last block."""

    def run(self, x: Tensor) -> Tensor:
        return x + super().run(x)


def adds_up(model: nn.Module, anatomy: Anatomy, ids: Tensor) -> None:
    """Assert that the captured sum of a long skip is a combination of its source and the stream."""
    sites = [site for s in anatomy.stacks for skip in s.long_skips for site in (skip.source, skip.sum)]
    with measuring(model):
        _, got = capture(model, lambda: model(ids), sites)
    assert set(got) == set(sites)
    assert all(tensor.shape[-1] == WIDTH for tensor in got.values())


@pytest.mark.parametrize("depth", [3, 6])
def test_a_speed_run_gpt_is_read_whole(depth: int) -> None:
    model, ids = Speedrun(depth), token_ids()
    anatomy = read_anatomy(model, ids)

    assert anatomy.unread == ()
    assert lines_of(anatomy) == [[*depth * [PRE_RMS], "final_norm=True"]]
    (read,) = anatomy.stacks
    assert read.complete
    assert [skip.into for skip in read.long_skips] == [*(f"blocks.{n}" for n in range(1, depth)), ""]
    assert [(skip.stream_scale, skip.skip_scale) for skip in read.long_skips][: depth - 1] == (depth - 1) * [
        ("learnt", "learnt")
    ]
    assert read.final_norm is not None
    assert read.final_norm.weight is None
    assert {branch.scheme for branch in read.branches} == {"nanochat"}
    adds_up(model, anatomy, ids)


def test_the_embedding_in_some_blocks_alone_is_no_scheme() -> None:
    anatomy = read_anatomy(Speedrun(4, range(2, 4)), token_ids())
    assert [skip.into for skip in anatomy.stacks[0].long_skips] == ["blocks.2", "blocks.3", ""]
    assert {branch.scheme for branch in anatomy.branches} == {None}


def test_shares_of_two_states_are_no_scheme() -> None:
    anatomy = read_anatomy(Speedrun(4, two_sources=True), token_ids())
    skips = anatomy.stacks[0].long_skips
    assert [skip.into for skip in skips] == ["blocks.1", "blocks.2", "blocks.3", ""]
    assert len({skip.source for skip in skips[:3]}) == 2
    assert {branch.scheme for branch in anatomy.branches} == {None}


def test_the_share_that_is_taken_out_is_a_long_skip_behind_the_last_block() -> None:
    last = read_anatomy(Speedrun(6), token_ids()).stacks[0].long_skips[-1]
    assert (last.into, last.stream_scale, last.skip_scale) == ("", None, "learnt")
    assert last.source.module == "blocks.3"


@pytest.mark.parametrize("learnt", [False, True])
def test_a_u_net_is_read_whole(learnt: bool) -> None:
    model, ids = UNet(6, learnt), token_ids()
    anatomy = read_anatomy(model, ids)
    assert anatomy.unread == ()
    expected = stack(*6 * ["A.pre F.pre"], final=True).lines()
    assert lines_of(anatomy) == [expected]
    skips = anatomy.stacks[0].long_skips
    assert {skip.skip_scale for skip in skips} == {"learnt" if learnt else 0.5}
    assert {skip.stream_scale for skip in skips} == {None}
    assert [skip.into for skip in skips] == ["blocks.3", "blocks.4", "blocks.5"]
    adds_up(model, anatomy, ids)


def test_dense_shares_are_long_skips() -> None:
    anatomy = read_anatomy(Dense(3), token_ids())
    assert anatomy.unread == ()
    assert lines_of(anatomy) == [stack(*3 * ["A.pre F.pre"], final=True).lines()]
    assert [skip.into for skip in anatomy.stacks[0].long_skips] == ["blocks.1", "blocks.2", ""]


def test_a_skip_around_the_whole_stack_is_a_long_skip() -> None:
    anatomy = read_anatomy(Whole(Block(), Block()), token_ids())
    assert anatomy.unread == ()
    assert lines_of(anatomy) == [stack(*2 * ["A.pre F.pre"], final=True).lines()]
    assert [skip.into for skip in anatomy.stacks[0].long_skips] == [""]


def test_a_reading_without_long_skips_has_none() -> None:
    assert read_anatomy(Tower(Block(), Block()), token_ids()).stacks[0].long_skips == ()


def test_the_report_names_the_long_skips() -> None:
    anatomy = read_anatomy(Speedrun(4), token_ids())
    text = text_anatomy(anatomy)
    assert "long skip  learnt·x + learnt·xᵢ into blocks.1…blocks.3" in text
    assert "long skip  x + learnt·xᵢ into the end of the stack" in text
    skips: list[dict[str, Any]] = anatomy.to_dict()["stacks"][0]["long_skips"]
    assert skips[0] == {"into": "blocks.1", "stream_scale": "learnt", "skip_scale": "learnt"}
    assert skips[-1] == {"into": "", "stream_scale": None, "skip_scale": "learnt"}
