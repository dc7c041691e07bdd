"""A model and its refactoring are one model; a change of the refactoring is the one difference."""

import math
from typing import Any

import made
import pytest
import torch
from made import LENGTH, WIDTH, Options
from torch import Tensor, nn

import normscope
from normscope.compare import Diff

IDS = torch.randint(0, made.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
OPTIONS = {
    "gelu": Options(),
    "rotary": Options(rotary="halves", positions=False, tied=False),
    "one head": Options(heads=1, rms=True),
    "post": Options(post=True, heads=2, activation="silu"),
}


def compared(a: Any, b: Any) -> Diff:
    """Structure and function of two models."""
    return normscope.diff(a, b, parts=("structure", "function"), batch=IDS, reraise=True)


def names(a: Any, b: Any) -> list[tuple[str, str]]:
    """Part and name of each difference."""
    return [(each.part.value, each.name) for each in compared(a, b).differences]


def plain(options: Options) -> Any:
    """The plain decoder, with biases that are not zero."""
    model = made.made("plain", options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


class Kernels(nn.Module):
    """Queries, keys and values by kernels (width, heads, size), and biases (heads, size), as in Flax."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.o, size = old.o, WIDTH // old.o.heads
        self.scale = self.o.scale or size**-0.5
        for name in ("query", "key", "value"):
            linear = getattr(old, name)
            setattr(self, name, nn.Parameter(linear.weight.detach().T.reshape(WIDTH, -1, size).clone()))
            setattr(self, f"{name}_bias", nn.Parameter(linear.bias.detach().reshape(-1, size).clone()))
        self.out = nn.Parameter(old.out.weight.detach().T.reshape(-1, size, WIDTH).clone())
        self.out_bias = nn.Parameter(old.out.bias.detach().clone())

    def map(self, x: Tensor, name: str) -> Tensor:
        y, bias = torch.einsum("btd,dhk->bthk", x, getattr(self, name)), getattr(self, f"{name}_bias")
        return y if bias is None else y + bias

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.map(x, name) for name in ("query", "key", "value"))
        if self.o.rotary:
            q, k = (made.turned(each.transpose(1, 2), self.o).transpose(1, 2) for each in (q, k))
        logits = torch.einsum("bthk,bshk->bhts", q * self.scale, k)
        logits = logits.masked_fill(~made.mask(x.shape[1], self.o), -math.inf)
        y = torch.einsum("bhts,bshk->bthk", logits.softmax(-1), v)
        return torch.einsum("bthk,hkd->btd", y, self.out) + self.out_bias


def by_kernels(model: Any) -> Any:
    """The model with kernels in the place of linear layers."""
    torch.manual_seed(0)
    other = made.Plain(model.o)
    other.load_state_dict(model.state_dict())
    for layer in other.layers:
        layer.attn = Kernels(layer.attn)  # type: ignore[union-attr]
    return other


@pytest.mark.parametrize("name", OPTIONS)
def test_biases_of_heads_are_the_same_biases(name: str) -> None:
    a = plain(OPTIONS[name])
    assert names(a, by_kernels(a)) == []
    assert names(by_kernels(a), a) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_beside_biases_of_heads_a_planted_difference_is_the_only_one(name: str) -> None:
    a = plain(OPTIONS[name])
    b = by_kernels(a)
    for layer in b.layers:
        layer.attn.scale /= 2
    assert names(a, b) == [("structure", "attention-scale"), ("function", "attention-scale")]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bias_of_heads_that_is_lost_is_named(name: str) -> None:
    a = plain(OPTIONS[name])
    b = by_kernels(a)
    b.layers[1].attn.query_bias = None
    assert names(a, b) == [("structure", "bias"), ("function", "bias")]
