"""Tests that a written-out norm is compared as the native one, wherever its gain and its shift stand."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normscope

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
WIDTH, HIDDEN, DEPTH, EPS = 16, 24, 2, 1e-5
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _inverse(x: Tensor) -> Tensor:
    square = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
    return torch.rsqrt(square + EPS)


LAYER: dict[str, Formula] = {
    "gain on the factor": lambda x, g, b: _centred(x) * (_inverse(x) * g) + b,
    "gain before the factor": lambda x, g, b: (g * _centred(x)) * _inverse(x) + b,
    "gain before the division": lambda x, g, b: g * _centred(x) / (1 / _inverse(x)) + b,
    "gain on both parts": lambda x, g, b: (
        x * (_inverse(x) * g) + (b - x.mean(-1, keepdim=True) * (_inverse(x) * g))
    ),
    "gain after": lambda x, g, b: b + g * (_centred(x) * _inverse(x)),
}
"""LayerNorms with a gain and a shift."""
RMS: dict[str, Formula] = {
    "gain on the factor": lambda x, g, b: x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * g),
    "gain on the tensor": lambda x, g, b: (x * g) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS),
    "gain after": lambda x, g, b: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * g,
}
"""RMSNorms with a gain."""


def layer_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The native LayerNorm."""
    return F.layer_norm(x, (WIDTH,), g, b, EPS)


def rms_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The native RMSNorm, without a shift."""
    return F.rms_norm(x, (WIDTH,), g, EPS)


class Norm(nn.Module):
    """A norm by a formula; the names of its parameters do not tell which is which."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula, self.is_native = formula, formula in (layer_norm, rms_norm)
        values = [torch.ones(WIDTH), torch.zeros(WIDTH)][: 1 + (formula not in (rms_norm, *RMS.values()))]
        self.own = nn.ParameterList(values if self.is_native else reversed(values))

    def forward(self, x: Tensor) -> Tensor:
        own = [*self.own] if self.is_native else [*self.own][::-1]
        return self.formula(x, own[0], own[-1])


class Layer(nn.Module):
    """A Pre-LN feed-forward."""

    def __init__(self, formula: Formula, gelu: str) -> None:
        super().__init__()
        self.norm = Norm(formula)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = nn.GELU(approximate=gelu)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """Feed-forwards with norms by a formula."""

    def __init__(self, formula: Formula, gelu: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer(formula, gelu) for _ in range(DEPTH))
        self.norm = Norm(formula)
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def names_of(a: Formula, b: Formula, gelu: str) -> set[str]:
    """Names of the differences of a model from one with other norms and perhaps another GELU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = Model(a, "none"), Model(b, gelu)
        return {
            d.name for d in normscope.diff(*models, batch=IDS, parts="function", reraise=True).differences
        }


@pytest.mark.parametrize(("gelu", "names"), [("none", set()), ("tanh", {"activation"})])
@pytest.mark.parametrize("spelling", LAYER)
def test_a_layer_norm_in_any_spelling_is_the_native_one(spelling: str, gelu: str, names: set[str]) -> None:
    assert names_of(layer_norm, LAYER[spelling], gelu) == names


@pytest.mark.parametrize(("gelu", "names"), [("none", set()), ("tanh", {"activation"})])
@pytest.mark.parametrize("spelling", RMS)
def test_an_rms_norm_in_any_spelling_is_the_native_one(spelling: str, gelu: str, names: set[str]) -> None:
    assert names_of(rms_norm, RMS[spelling], gelu) == names
