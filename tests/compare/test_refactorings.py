"""A model and its refactoring are one model; a change of the refactoring is the one difference."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import made
import pytest
import torch
import torch.nn.functional as F
from made import LENGTH, WIDTH, Options
from torch import Tensor, nn

import normscope
from normscope.compare import Diff
from thinned import thinned

IDS = torch.randint(0, made.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
OPTIONS = {
    "gelu": Options(depth=2),
    "rotary": Options(depth=2, rotary="halves", positions=False, tied=False),
    "one head": Options(depth=2, heads=1, rms=True),
    "post": Options(depth=2, post=True, heads=2, activation="silu"),
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


class Copied(nn.Module):
    """Two heads of keys and values, copied for the heads of queries."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, self.scale, self.cap = o, 0.3, 0.0
        sizes = {"query": WIDTH, "key": 2 * WIDTH // o.heads, "value": 2 * WIDTH // o.heads}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, size, bias=o.bias))
        self.out = nn.Linear(WIDTH, WIDTH)

    def parted(self, x: Tensor) -> Iterator[Tensor]:
        """Queries, keys and values, (B, H or 2, T, K)."""
        size = WIDTH // self.o.heads
        for name in ("query", "key", "value"):
            y = getattr(self, name)(x).unflatten(-1, (-1, size)).transpose(1, 2)
            yield made.turned(y, self.o) if self.o.rotary and name != "value" else y

    def weights(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale
        logits = self.cap * torch.tanh(logits / self.cap) if self.cap else logits
        return logits.masked_fill(~made.mask(logits.shape[-1], self.o), -math.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parted(x)
        k, v = (each.repeat_interleave(self.o.heads // 2, 1) for each in (k, v))
        return self.out((self.weights(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class Shared(Copied):
    """The same without copies: an axis of groups, and one of the heads in a group."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parted(x)
        weights = self.weights(torch.einsum("bgrtk,bgsk->bgrts", q.unflatten(1, (2, -1)), k))
        return self.out(torch.einsum("bgrts,bgsk->btgrk", weights, v).flatten(2))


GROUPED = {
    "plain": Options(depth=2),
    "rotary": Options(depth=2, rotary="halves", positions=False),
    "post": Options(depth=2, post=True, heads=8, bias=False),
}
CHANGES: dict[str, Callable[[Any], None]] = {
    "attention-scale": lambda attention: setattr(attention, "scale", 0.2),
    "logit-cap": lambda attention: setattr(attention, "cap", 0.4),
    "window": lambda attention: setattr(attention, "o", replace(attention.o, window=7)),
}


def grouped(name: str, *kinds: type[nn.Module]) -> tuple[Any, Any]:
    """Two decoders of the same weights, with attentions of two kinds."""
    a, b = (made.with_attention(kind, GROUPED[name]) for kind in kinds)
    b.load_state_dict(a.state_dict())
    return a, b


@pytest.mark.parametrize("name", GROUPED)
def test_keys_that_groups_share_without_a_copy_are_the_same_keys(name: str) -> None:
    assert names(*grouped(name, Copied, Shared)) == []


KINDS = ((Copied, Shared), (Shared, Copied), (Shared, Shared))


@pytest.mark.parametrize(("name", "change", "kinds"), thinned(GROUPED, CHANGES, KINDS, every=3))
def test_a_planted_difference_is_named_where_keys_are_not_copied(
    name: str, change: str, kinds: tuple[type[nn.Module], type[nn.Module]]
) -> None:
    a, b = grouped(name, *kinds)
    for layer in b.layers:
        CHANGES[change](layer.attn)
    found = names(a, b)
    assert found[-1] == ("function", change)
    assert {name for _, name in found} == {change}


@pytest.mark.parametrize("layouts", [("halves", "neighbours"), ("neighbours", "halves")])
def test_rotary_pairs_are_named_where_keys_are_not_copied(layouts: tuple[str, str]) -> None:
    a, b = grouped("rotary", Copied, Shared)
    for model, layout in zip((a, b), layouts, strict=True):
        for layer in model.layers:
            layer.attn.o = replace(layer.attn.o, rotary=layout)
    assert names(a, b) == [("structure", "rotary-layout"), ("function", "rotary-layout")]


def by_hand(factor: float) -> Callable[[Tensor], Tensor]:
    """GELU by tanh, with its factor √(2/π) as it is written."""
    return lambda x: 0.5 * x * (1 + torch.tanh(factor * x * (1 + 0.044715 * x * x)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("factor", "differs"), [(0.79788456, False), (0.7978845608, False), (0.7979, True)])
def test_a_constant_with_the_digits_of_float32_is_the_constant(
    name: str, factor: float, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(made.ACTIVATIONS, "by hand", by_hand(factor))
    a = made.made("plain", replace(OPTIONS[name], activation="tanh"))
    b = made.made("plain", replace(OPTIONS[name], activation="by hand"))
    found = normscope.diff(a, b, parts=("function",), batch=IDS, reraise=True)
    assert bool(found.differences) is differs


class Starting(made.Plain):
    """The embedding of one or several types of tokens, of which all are the first, is added."""

    def __init__(self, o: Options, types: int, how: str) -> None:
        super().__init__(o)
        self.types, self.how = nn.Embedding(types, WIDTH), how

    def forward(self, ids: Tensor) -> Tensor:
        first = self.types(torch.zeros_like(ids)) if self.how == "table" else self.types.weight[0]
        x = self.tokens(ids) + first
        x = x if self.positions is None else x + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("name", "types"), thinned(OPTIONS, [1, 2]))
def test_the_one_row_of_token_types_is_their_table(name: str, types: int) -> None:
    a, b = (Starting(OPTIONS[name], types, how) for how in ("table", "row"))
    b.load_state_dict(a.state_dict())
    assert names(a, b) == []
    assert names(made.Plain(OPTIONS[name]), b)[0] == ("structure", "token-types")


class Pointwise(nn.Module):
    """A feed-forward of convolutions of size 1, as in fairseq."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.o = old.o
        for name in ("up", "down"):
            out, width = getattr(old, name).weight.shape
            setattr(self, name, nn.Conv1d(width, out, 1, bias=old.o.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(made.ACTIVATIONS[self.o.activation](self.up(x.mT))).mT


class Stacked(nn.Module):
    """A feed-forward whose matrices are those of one layer of tensors of all layers."""

    def __init__(self, old: Any, up: nn.Parameter, down: nn.Parameter, layer: int) -> None:
        super().__init__()
        self.o, self.up, self.down, self.layer = old.o, up, down, layer
        self.up_bias, self.down_bias = old.up.bias, old.down.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.up[self.layer], self.up_bias)
        return F.linear(made.ACTIVATIONS[self.o.activation](y), self.down[self.layer], self.down_bias)


def rewritten(how: str, options: Options) -> Any:
    """The plain decoder with other feed-forwards."""
    model: Any = made.made("plain", options)
    ups, downs = ([getattr(each.mlp, n).weight.detach() for each in model.layers] for n in ("up", "down"))
    up, down = (nn.Parameter(torch.stack(each)) for each in (ups, downs))
    for n, layer in enumerate(model.layers):
        layer.mlp = Pointwise(layer.mlp) if how == "convolutions" else Stacked(layer.mlp, up, down, n)
    return model


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("how", ["convolutions", "stacked"])
def test_a_feed_forward_written_in_another_way_has_one_expert_of_the_same_width(how: str, name: str) -> None:
    a, b = made.made("plain", OPTIONS[name]), rewritten(how, OPTIONS[name])
    assert made.differences(a, b) == ()
    wide = made.made("plain", replace(OPTIONS[name], hidden=2 * WIDTH))
    assert [each.name for each in made.differences(wide, b)] == ["hidden-width"]


class Tiled(Shared):
    """Heads share keys in the order of tiles, not of neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parted(x)
        tiles = q.unflatten(1, (-1, 2)).transpose(1, 2)
        weights = self.weights(torch.einsum("bgrtk,bgsk->bgrts", tiles, k))
        y = torch.einsum("bgrts,bgsk->btgrk", weights, v)
        return self.out(y.transpose(2, 3).flatten(2))


@pytest.mark.parametrize(("name", "kind"), thinned(GROUPED, [Copied, Shared]))
def test_groups_in_another_order_are_named_where_keys_are_not_copied(
    name: str, kind: type[nn.Module]
) -> None:
    assert {found for _, found in names(*grouped(name, kind, Tiled))} == {"kv-groups"}
    assert {found for _, found in names(*grouped(name, Tiled, Tiled))} == set()
