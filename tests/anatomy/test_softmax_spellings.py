"""Attention is read however its softmax is written."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.subjects import make_subject

MASK = torch.ones(8, 8).tril().bool()


def hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(~MASK, float("-inf"))


def in_place(x: Tensor) -> Tensor:
    terms = (x - x.amax(-1, keepdim=True)).exp_()
    terms /= terms.sum(-1, keepdim=True)
    return terms


def masked_terms(x: Tensor) -> Tensor:
    terms = torch.exp(x - x.max(-1, keepdim=True).values) * MASK
    return terms / (terms.sum(-1, keepdim=True) + 1e-9)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "PyTorch's": lambda x: hidden(x).softmax(-1),
    "terms over their sum": lambda x: (y := hidden(x)).exp() / y.exp().sum(-1, keepdim=True),
    "without the maximum": lambda x: (
        (t := (hidden(x) - hidden(x).amax(-1, keepdim=True)).exp()) / t.sum(-1, True)
    ),
    "max with indices": lambda x: (
        (t := torch.exp((y := hidden(x)) - y.max(-1, keepdim=True)[0])) / t.sum(-1, True)
    ),
    "logsumexp": lambda x: torch.exp((y := hidden(x)) - y.logsumexp(-1, keepdim=True)),
    "log-softmax": lambda x: hidden(x).log_softmax(-1).exp(),
    "masked terms": masked_terms,
    "reciprocal": lambda x: (t := hidden(x).exp()) * t.sum(-1, keepdim=True).reciprocal(),
    "in place": lambda x: in_place(hidden(x)),
    "float64 between": lambda x: (t := hidden(x).double().exp()).div(t.sum(-1, keepdim=True)).float(),
}
DIFFERENT: dict[str, Callable[[Tensor], Tensor]] = {
    "another sum": lambda x: x.exp() / (x * 2).exp().sum(-1, keepdim=True),
    "no exponential": lambda x: x.relu() / (x.relu().sum(-1, keepdim=True) + 1),
    "sum over two axes": lambda x: x.exp() / x.exp().sum((-2, -1), keepdim=True),
    "sum over everything": lambda x: x.exp() / x.exp().sum(),
    "shifted by a mean": lambda x: torch.exp(x - x.mean(-1, keepdim=True)),
}


class Attention(nn.Module):
    """Pre-norm attention with a softmax of one's own."""

    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.a, self.b, self.c))
        return x + self.d((self.softmax(q @ k.mT / 8**0.5) @ v).transpose(1, 2).flatten(2))


def model(softmax: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), Attention(softmax), Attention(softmax), nn.Linear(16, 32))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_is_read_in_every_spelling(spelling: str) -> None:
    anatomy = read_anatomy(make_subject(model(SPELLINGS[spelling]), torch.arange(16).reshape(2, 8)))
    branches = [branch for block in anatomy.blocks for branch in block.branches]
    assert [branch.kind for branch in branches] == ["attention", "attention"]
    for branch in branches:
        assert [len(branch.attention), branch.placement] == [1, "pre"]
        assert [projection.roles for projection in branch.projections] == [("q",), ("k",), ("v",), ("o",)]
    assert anatomy.stacks[0].name == "decoder"


@pytest.mark.parametrize("spelling", DIFFERENT)
def test_other_weights_are_no_softmax(spelling: str) -> None:
    anatomy = read_anatomy(make_subject(model(DIFFERENT[spelling]), torch.arange(16).reshape(2, 8)))
    assert not any(branch.attention for block in anatomy.blocks for branch in block.branches)
