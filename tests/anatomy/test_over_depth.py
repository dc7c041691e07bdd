"""Tests of attention over depth: written as in the paper it is reported, and its neighbours are read."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handwritten_base import WIDTH, Attention, Block, FeedForward, Tower, token_ids
from torch import Tensor, nn

from normscope.anatomy import over_depth, read_anatomy
from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.ops import SAME, SOFTMAX


class DepthAttention(nn.Module):
    """softmax(w·RMSNorm(v_i)) over a stack of outputs, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.norm = nn.Linear(WIDTH, 1, bias=False), nn.RMSNorm(WIDTH)

    def forward(self, blocks: list[Tensor], partial: Tensor) -> Tensor:
        values = torch.stack([*blocks, partial])
        logits = torch.einsum("d,nbtd->nbt", self.projection.weight.squeeze(), self.norm(values))
        return torch.einsum("nbt,nbtd->btd", logits.softmax(0), values)


class AttentionResiduals(Tower):
    """Sublayers as in the paper's pseudocode, with `size` of them in a block of sums."""

    def __init__(self, size: int) -> None:
        super().__init__(Block(), Block(), Block())
        self.mixes, self.size = nn.ModuleList(DepthAttention() for _ in range(6)), size

    def run(self, x: Tensor) -> Tensor:
        blocks: list[Tensor] = []
        partial, index = x, 0
        for block in self.blocks:
            for branch, norm in ((block.attention, block.norm1), (block.feed_forward, block.norm2)):
                h = self.mixes[index](blocks, partial)
                y = branch(norm(h))
                if index % self.size == 0:
                    blocks, partial = [*blocks, partial], y
                else:
                    partial = partial + y
                index += 1
        return torch.stack([*blocks, partial]).sum(0)


class Experts(nn.Module):
    """A dense mixture: the softmax of a router's scores of the input weighs the experts' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router = nn.ModuleList(FeedForward() for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (F.softmax(self.router(x), dim=-1)[..., None] * outputs).sum(-2)


class TwoGates(Experts):
    """Two routers weigh the same experts' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [expert(x) for expert in self.experts]
        shares = [F.softmax(router(x), dim=-1)[..., None] for router in (self.router, self.other)]
        return sum((share * torch.stack(outputs, dim=-2)).sum(-2) for share in shares)


class MixedExperts(Block):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__(Attention())
        self.feed_forward = experts


class PooledTower(Tower):
    """Pre-LN whose head reads one attention-weighted sum of all blocks' outputs."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.pool = DepthAttention()

    def run(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.pool(outputs[:-1], outputs[-1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_papers_pseudocode_is_attention_over_depth(size: int) -> None:
    anatomy = read_anatomy(AttentionResiduals(size), token_ids())
    assert not anatomy.stacks
    (words,) = anatomy.unread
    assert "Attention Residuals" in words


@pytest.mark.parametrize("experts", [Experts, TwoGates])
def test_a_mixture_of_experts_weighs_by_scores_of_its_input(experts: type[nn.Module]) -> None:
    anatomy = read_anatomy(Tower(MixedExperts(experts()), MixedExperts(experts())), token_ids())
    assert [b.placement for b in anatomy.branches] == ["pre"] * 4
    assert not anatomy.unread


def test_one_pool_over_the_blocks_leaves_the_stream_to_read() -> None:
    anatomy = read_anatomy(PooledTower(), token_ids())
    assert [b.placement for b in anatomy.branches] == ["pre"] * 4


def slow_reference(ops: list[Op]) -> int | None:
    """Number of sums over depth, with the way back followed from every softmax; None where none follow."""
    found: list[set[Value]] = []
    for op in ops:
        if op.base in SOFTMAX and op.inputs and op.inputs[0].live:
            back = set(search([op.source], over_depth._back_to_joined))
            joined = over_depth._weighed(op.outputs[0]) & back
            found += [{v.behind(SAME) for v in value.inputs} for value in joined]
    return len(found) if any(a & b for a, b in itertools.pairwise(found)) else None


@pytest.mark.parametrize(
    ("model", "is_followed"),
    [
        (lambda: Tower(Block(), Block(), Block()), False),
        (lambda: Tower(MixedExperts(TwoGates()), Block()), True),
        (PooledTower, True),
        (lambda: AttentionResiduals(1), True),
        (lambda: AttentionResiduals(2), True),
    ],
    ids=["plain", "experts", "pool", "every output", "blocks of outputs"],
)
def test_only_a_softmax_that_weighs_joined_values_is_followed_back(
    model: Callable[[], nn.Module], is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back goes to the input: over all attention of a deep stack it would be quadratic in depth."""
    seen: list[list[Op]] = []
    monkeypatch.setattr("normscope.anatomy.assemble.attention_over_depth", seen.append)
    read_anatomy(model(), token_ids())
    (ops,) = seen
    expected, steps = slow_reference(ops), []
    back = over_depth._back_to_joined
    monkeypatch.setattr(over_depth, "_back_to_joined", lambda value: steps.append(value) or back(value))
    found = over_depth.attention_over_depth(ops)
    assert (None if found is None else int(found.split()[0])) == expected
    assert bool(steps) == is_followed
