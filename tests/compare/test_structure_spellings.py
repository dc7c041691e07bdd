"""Structure of a block whose biases, heads or weights are held in another way."""

import math
from collections.abc import Callable

import pytest
import torch
from reimplemented import BLOCKS, HEAD, HEADS, WIDTH, NanoGPT
from torch import Tensor, nn
from torch.nn import functional as F

import normscope
from normscope.compare.types import Part

IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
KV_HEADS, HIDDEN = 2, 3 * WIDTH


class Sequential(nn.Module):
    """Attention with groups of heads, then a feed-forward; one after the other or side by side."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.Identity() if parallel else nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Values mixed by attention, heads merged."""
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        above = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(HEAD)).masked_fill(above, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def attend(self, x: Tensor) -> Tensor:
        return self.mixed(self.q(x), self.k(x), self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.parallel:
            return x + self.o(self.attend(y)) + self.down(F.gelu(self.up(y)))
        x = x + self.o(self.attend(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ExpandedBias(Sequential):
    """Megatron's way: the last bias of a branch is expanded and added beside the stream."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.norm(x)) @ self.o.weight.T
        x = y + self.o.bias.expand_as(y) + x
        y = F.gelu(self.up(self.norm2(x))) @ self.down.weight.T
        return y + self.down.bias.expand_as(y) + x


class OwnBias(ExpandedBias):
    """The same with biases that no layer holds."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self.after_mixing, self.after_hidden = (
            nn.Parameter(torch.ones(WIDTH)),
            nn.Parameter(torch.ones(WIDTH)),
        )
        self.o.bias = self.down.bias = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.norm(x)) @ self.o.weight.T
        x = y + self.after_mixing.expand_as(y) + x
        y = F.gelu(self.up(self.norm2(x))) @ self.down.weight.T
        return y + self.after_hidden.expand_as(y) + x


class LastBias(Sequential):
    """Python adds the bias of the feed-forward to the sum of both branches."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.o(self.attend(y)) + F.gelu(self.up(y)) @ self.down.weight.T + self.down.bias


class OneMap(Sequential):
    """PaLM's way: one map makes q, k, v and the hidden features."""

    def forward(self, x: Tensor) -> Tensor:
        fused = torch.cat([each.weight for each in (self.q, self.k, self.v, self.up)])
        q, k, v, h = F.linear(self.norm(x), fused).split(
            [WIDTH, KV_HEADS * HEAD, KV_HEADS * HEAD, HIDDEN], -1
        )
        return x + self.o(self.mixed(q, k, v)) + self.down(F.gelu(h))


class StackedDown(Sequential):
    """One tensor for the last maps of all layers, and an einsum with the slice of this one."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self.layer, self.downs = 0, nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(self.norm(x)))
        h = F.gelu(self.up(self.norm2(x)))
        return x + torch.einsum("btf,fe->bte", h, self.downs[self.layer]) + self.down.bias


def model(block: Callable[..., nn.Module], *, parallel: bool) -> NanoGPT:
    built = NanoGPT()
    built.h = nn.ModuleList(block(parallel=parallel) for _ in range(BLOCKS))
    if block is StackedDown:
        downs = nn.Parameter(0.02 * torch.randn(BLOCKS, HIDDEN, WIDTH))
        for number, each in enumerate(built.h):
            each.layer, each.downs = number, downs
    return built


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("block", "parallel"), [(ExpandedBias, False), (LastBias, True), (OneMap, True), (StackedDown, False)]
)
def test_another_way_to_hold_the_same_is_no_difference(
    block: type[Sequential], parallel: bool, turned: bool
) -> None:
    pair = [model(Sequential, parallel=parallel), model(block, parallel=parallel)]
    found = normscope.diff(*pair[:: -1 if turned else 1], batch=IDS, parts="structure", reraise=True)
    assert found.of(Part.STRUCTURE) == ()


@pytest.mark.parametrize("turned", [False, True])
def test_a_bias_behind_both_branches_is_the_last_ones(turned: bool) -> None:
    pair = [model(Sequential, parallel=True), model(LastBias, parallel=True)]
    for each in (*pair[0].h, *pair[1].h):
        each.o.bias = None
    found = normscope.diff(*pair[:: -1 if turned else 1], batch=IDS, parts="structure", reraise=True)
    assert found.of(Part.STRUCTURE) == ()


@pytest.mark.parametrize("turned", [False, True])
def test_an_expanded_bias_has_its_partner(turned: bool) -> None:
    pair = [model(Sequential, parallel=False), model(OwnBias, parallel=False)]
    found = normscope.diff(*pair[:: -1 if turned else 1], batch=IDS, parts="function", reraise=True)
    assert found.of(Part.FUNCTION) == ()
    assert not any("guessed" in note or "without a partner" in note for note in found.notes)


@pytest.mark.parametrize(("block", "parallel"), [(ExpandedBias, False), (LastBias, True)])
def test_a_bias_that_is_missing_there_is_one(block: type[Sequential], parallel: bool) -> None:
    a, b = model(Sequential, parallel=parallel), model(block, parallel=parallel)
    for each in a.h:
        each.down.bias = None
    found = normscope.diff(a, b, batch=IDS, parts="structure", reraise=True)
    assert {each.name for each in found.of(Part.STRUCTURE)} == {"bias"}
