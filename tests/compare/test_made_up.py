"""Checkpoints that make up for other code: rows of q and k turned for another layout, folded scales."""

import copy
from typing import Any

import made
import pytest
import torch
from made import HEADS, WIDTH, Options
from torch import Tensor, nn

import normscope
from normscope.compare import Diff
from normscope.compare.types import Part

HEAD = WIDTH // HEADS
INTERLEAVED = torch.arange(HEAD).reshape(2, -1).T.flatten()
ORDER = {"neighbours": INTERLEAVED, "halves": INTERLEAVED.argsort()}
"""Layout → the order of a head's features in which it turns what the other one turns."""


def turned(weight: Tensor, layout: str) -> Tensor:
    return weight.unflatten(0, (HEADS, HEAD))[:, ORDER[layout]].flatten(0, 1)


@torch.no_grad()
def converted(source: nn.Module, names: tuple[str, ...] = ("query", "key"), **changes: Any) -> nn.Module:
    """A copy with the other layout, whose projections of these names are turned for it."""
    layout = {"halves": "neighbours", "neighbours": "halves"}[options(source).rotary]
    model = made.made("plain", Options(**{"depth": 2, "rotary": layout, **changes}), seed=1)
    model.load_state_dict(copy.deepcopy(source.state_dict()))
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            for parameter in module.parameters():
                parameter.copy_(turned(parameter, layout))
    return model


def options(model: nn.Module) -> Options:
    return next(each.o for each in model.modules() if isinstance(each, made.Attention))


def compared(a: nn.Module, b: nn.Module) -> Diff:
    return normscope.diff(a, b, parts="structure,function", batch=made.batch(), reraise=True)


@pytest.mark.parametrize("layout", ORDER)
def test_a_right_conversion_is_the_same_function(layout: str) -> None:
    source = made.made("plain", Options(depth=2, rotary=layout))
    found = compared(source, converted(source))
    assert found.differences == ()
    assert any("The weights make up for it" in note for note in found.notes)


@pytest.mark.parametrize("layout", ORDER)
@pytest.mark.parametrize(
    ("changes", "name"),
    [({"eps": 1e-3}, "norm-eps"), ({"scale": 0.2}, "attention-scale"), ({"window": 3}, "window")],
)
def test_beside_it_a_planted_difference_is_the_only_one(
    layout: str, changes: dict[str, Any], name: str
) -> None:
    source = made.made("plain", Options(depth=2, rotary=layout))
    found = compared(source, converted(source, **changes))
    assert {each.name for each in found.of(Part.FUNCTION)} - {"final-norm-eps"} == {name}
    assert {each.name for each in found.of(Part.STRUCTURE)} - {"final-norm-eps"} == {name}


@pytest.mark.parametrize("names", [("query",), ("key",), ()])
def test_a_conversion_that_turns_too_little_is_a_difference(names: tuple[str, ...]) -> None:
    source = made.made("plain", Options(depth=2, rotary="halves"))
    found = compared(source, converted(source, names))
    assert "rotary-layout" in {each.name for each in found.of(Part.FUNCTION)}


def test_a_conversion_without_another_layout_is_a_difference() -> None:
    source = made.made("plain", Options(depth=2, rotary="halves"))
    found = compared(source, converted(source, rotary="halves"))
    assert {each.name for each in found.of(Part.FUNCTION)} == {"weights-order"}


FOLDED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "attention-scale": ({"scale": 0.3}, {"scale": 1.0}, ("query",)),
    "branch-scale": ({"branch_scale": 0.3}, {"branch_scale": 1.0}, ("out", "down")),
}
"""Scale → options of A and B, and the maps into which B's checkpoint folds it."""


@torch.no_grad()
def folded(scale: str, factor: float = 0.3, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and one that lacks the scale, whose weights are multiplied by the factor."""
    one, other, names = FOLDED[scale]
    a = made.made("plain", Options(depth=2, **one))
    b = made.made("plain", Options(depth=2, **{**other, **changes}), seed=1)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for name, module in b.named_modules():
        if name.rpartition(".")[2] in names:
            for parameter in module.parameters():
                parameter.mul_(factor)
    return a, b


@pytest.mark.parametrize("scale", FOLDED)
def test_a_folded_scale_is_no_difference(scale: str) -> None:
    found = compared(*folded(scale))
    assert found.differences == ()
    assert found.parts[1].figures["largest"] < 1e-6


@pytest.mark.parametrize("scale", FOLDED)
def test_beside_a_folded_scale_a_planted_difference_is_the_only_one(scale: str) -> None:
    found = compared(*folded(scale, activation="relu"))
    assert [each.name for each in found.differences] == ["activation", "activation"]


@pytest.mark.parametrize("scale", FOLDED)
@pytest.mark.parametrize("factor", [1.0, 0.31])
def test_a_scale_that_is_folded_wrongly_is_a_difference(scale: str, factor: float) -> None:
    assert scale in {each.name for each in compared(*folded(scale, factor)).of(Part.FUNCTION)}


@torch.no_grad()
def test_weights_that_a_conversion_rounds_are_the_same() -> None:
    a = made.made("plain", Options(depth=2))
    b = copy.deepcopy(a)
    for module in b.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.mul_(1 + 3e-7)
    found = compared(a, b)
    assert found.differences == ()
    assert 1e-9 < found.parts[1].figures["largest"] < 1e-6
    assert "as they stand" in found.parts[1].said


@torch.no_grad()
@pytest.mark.parametrize("kind", ["folded", "turned"])
def test_a_conversion_that_forgets_the_biases_is_a_difference_beside_another(kind: str) -> None:
    if kind == "folded":
        a, b = folded("attention-scale", activation="relu")
        wrong = "attention-scale"
    else:
        a = made.made("plain", Options(depth=2, rotary="halves"))
        b = converted(a, activation="relu")
        wrong = "rotary-layout"
    given = dict(a.named_parameters())
    for name, parameter in b.named_parameters():
        if name.endswith(("query.bias", "key.bias")):
            parameter.copy_(given[name])
    found = compared(a, b).of(Part.FUNCTION)
    assert {"activation", wrong} <= {each.name for each in found}


class Raised(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + w."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class Sandwich(nn.Module):
    """A block with norms before and behind each branch; the one behind the attention may be left unused."""

    def __init__(self, norm: type[nn.RMSNorm], *, leaves_out: bool) -> None:
        super().__init__()
        o = Options(depth=2, rotary="halves")
        self.attention, self.feed = made.Attention(o), made.FeedForward(o)
        self.norms, self.leaves_out = nn.ModuleList(norm(WIDTH, 1e-6) for _ in range(4)), leaves_out

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.norms
        y = self.attention(first(x))
        x = x + (y if self.leaves_out else second(y))
        return x + fourth(self.feed(third(x)))


def sandwiches(norm: type[nn.RMSNorm], *, leaves_out: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Sandwich(norm, leaves_out=leaves_out) for _ in range(2))
    return nn.Sequential(nn.Embedding(made.VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, made.VOCABULARY))


@torch.no_grad()
def test_the_values_of_a_weight_that_one_side_leaves_unused_are_no_difference() -> None:
    source, port = sandwiches(Raised), sandwiches(nn.RMSNorm, leaves_out=True)
    for name, parameter in source.named_parameters():
        if "norms" in name:
            parameter.normal_(0.0, 0.3)
    port.load_state_dict({n: v + 1 if "norms" in n else v for n, v in source.state_dict().items()})
    found = compared(source, port)
    assert [(each.part, each.name) for each in found.differences] == [
        (Part.STRUCTURE, "placement"),
        (Part.FUNCTION, "placement"),
    ]
    assert found.of(Part.FUNCTION)[0].is_first
