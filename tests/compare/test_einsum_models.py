"""Tests that maps and attentions written by einsum are compared as the usual ones."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normscope
from normscope.compare import Diff

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
WIDTH, HEADS, HIDDEN, DEPTH, LENGTH = 16, 4, 24, 2, 8
Softmax = Callable[[Tensor], Tensor]
RULES = {"feed-forward": ("...c,cf->...f", "...f,fc->...c"), "lettered": ("btc,cf->btf", "btf,fc->btc")}


def softmax(x: Tensor) -> Tensor:
    """The native softmax."""
    return x.softmax(-1)


SOFTMAXES: dict[str, Softmax] = {
    "logsumexp": lambda x: torch.exp(x - torch.logsumexp(x, -1, keepdim=True)),
    "log-softmax": lambda x: torch.log_softmax(x, -1).exp(),
    "largest": lambda x: _shares((x - x.amax(-1, keepdim=True)).exp()),
    "largest by max": lambda x: _shares((x - x.max(-1, keepdim=True).values).exp()),
    "bare": lambda x: _shares(x.exp()),
    "product": lambda x: x.exp() * x.exp().sum(-1, keepdim=True).reciprocal(),
    "einsum": lambda x: x.exp() / torch.einsum("bhqk->bhq", x.exp())[..., None],
    "in float64": lambda x: _shares((x - x.amax(-1, keepdim=True)).double().exp()).to(x.dtype),
}


def _shares(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


class Layer(nn.Module):
    """A Pre-LN layer with bare kernels."""

    def __init__(self, by: Softmax, rules: tuple[str, str] | None, ahead: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        k, shape = WIDTH // HEADS, (WIDTH, HEADS, WIDTH // HEADS)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape) / WIDTH**0.5) for _ in range(3))
        self.q_bias, self.k_bias, self.v_bias = (nn.Parameter(torch.randn(HEADS, k)) for _ in range(3))
        self.o, self.o_bias = nn.Parameter(torch.randn(HEADS, k, WIDTH) / 8), nn.Parameter(torch.randn(WIDTH))
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(WIDTH, HIDDEN) / 4),
            nn.Parameter(torch.randn(HIDDEN)),
        )
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 4)
        self.down_bias = nn.Parameter(torch.randn(WIDTH))
        self.by, self.rules, self.ahead = by, rules, ahead

    def attention(self, x: Tensor) -> Tensor:
        if self.rules is None:
            q, k, v = (
                (x @ w.flatten(1) + b.flatten()).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for w, b in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
            )
            scores = q @ k.mT / math.sqrt(q.shape[-1])
        else:
            q, k, v = (
                torch.einsum("btc,chd->bthd", x, w) + b
                for w, b in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
            )
            scores = torch.einsum("...qhd,...khd->...hqk", q / math.sqrt(q.shape[-1]), k)
        seen = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), self.ahead)
        scores = torch.where(seen, scores, -1e9)
        weights = self.by(scores)
        if self.rules is None:
            return (weights @ v).transpose(1, 2).flatten(2) @ self.o.flatten(0, 1) + self.o_bias
        mixed = torch.einsum("...hqk,...khd->...qhd", weights, v)
        return torch.einsum("bthd,hdc->btc", mixed, self.o) + self.o_bias

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.rules is None:
            return F.gelu(x @ self.up + self.up_bias) @ self.down + self.down_bias
        up, down = self.rules
        return (
            torch.einsum(down, F.gelu(torch.einsum(up, x, self.up) + self.up_bias), self.down)
            + self.down_bias
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class Model(nn.Module):
    """A language model of such layers; those with einsum maps have a native or another softmax."""

    def __init__(self, by: Softmax = softmax, rules: tuple[str, str] | None = None, ahead: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer(by, rules, ahead) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Usual(nn.Module):
    """The same model of PyTorch's layers, with other names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(32, WIDTH)
        options = {"norm_first": True, "batch_first": True, "dropout": 0.0, "activation": "gelu"}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options)  # type: ignore[arg-type]
            for _ in range(DEPTH)
        )
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.out(self.last(x))


def compared(a: nn.Module, b: nn.Module) -> Diff:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return normscope.diff(a, b, batch=IDS, parts="structure", reraise=True)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_maps_by_einsum_are_the_usual_ones(rules: tuple[str, str]) -> None:
    assert compared(Model(), Model(rules=rules)).differences == ()


@pytest.mark.parametrize("spelling", SOFTMAXES)
def test_a_softmax_in_any_spelling_is_the_native_one(spelling: str) -> None:
    b = Model(SOFTMAXES[spelling], RULES["feed-forward"])
    assert [d.message for d in compared(Model(), b).differences] == []


@pytest.mark.parametrize("ahead", [1, LENGTH])
@pytest.mark.parametrize("spelling", ["native", *SOFTMAXES])
def test_a_mask_that_shows_later_tokens_is_the_only_difference(spelling: str, ahead: int) -> None:
    b = Model(SOFTMAXES.get(spelling, softmax), RULES["feed-forward"], ahead)
    assert {d.name for d in compared(Model(), b).differences} == {"causal"}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_kernels_with_an_axis_for_heads_are_the_usual_ones(rules: tuple[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = Usual(), Model(rules=rules, ahead=LENGTH)
        found = normscope.diff(a, b, batch=IDS, parts="function", reraise=True)
    assert {d.name for d in found.differences} == {"causal"}


class Looped(Layer):
    """A layer whose heads run one after the other."""

    scale, order = 1.0, 1

    def attention(self, x: Tensor) -> Tensor:
        kernels = ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        q, k, v = ((x @ w.flatten(1) + b.flatten()).chunk(HEADS, -1) for w, b in kernels)
        seen = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        found = []
        for n in range(HEADS):
            scores = self.scale * q[n] @ k[n].mT / math.sqrt(q[n].shape[-1])
            found.append(torch.where(seen, scores, -1e9).softmax(-1) @ v[n])
        return torch.cat(found[:: self.order], -1) @ self.o.flatten(0, 1) + self.o_bias


@pytest.mark.parametrize(
    ("changed", "name"), [({}, None), ({"scale": 0.5}, "attention-scale"), ({"order": -1}, "head-order")]
)
@pytest.mark.parametrize("is_of_a", [False, True])
def test_heads_one_after_the_other_are_those_of_one_attention(
    changed: dict[str, float], name: str | None, is_of_a: bool
) -> None:
    """A reason that cannot be undone, since each head has tensors of its own, leaves no unknown one."""
    b = Model()
    for layer in b.layers:
        layer.__class__ = type("Changed", (Looped,), changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sides = (b, Model()) if is_of_a else (Model(), b)
        found = normscope.diff(*sides, batch=IDS, parts="function", reraise=True).differences
    assert [each.name for each in found] == ([] if name is None else [name])
