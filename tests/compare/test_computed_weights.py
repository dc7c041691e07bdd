"""Weights that a model computes from parameters: parametrised, low-rank, standardised, joined; buffers."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reimplemented
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations

import normscope
from normscope.compare import Diff
from normscope.compare.types import Part
from thinned import thinned

IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
Model = reimplemented.NanoGPT


def compared(a: nn.Module, b: nn.Module) -> Diff:
    return normscope.diff(a, b, batch=IDS, parts="function", reraise=True)


class LowRank(nn.Module):
    """A projection by w + α·b·a, as LoRA makes it."""

    def __init__(self, base: nn.Linear, alpha: float = 1.0) -> None:
        super().__init__()
        self.base, self.alpha = base, alpha
        self.a, self.b = (
            nn.Parameter(0.1 * torch.randn(4, base.in_features)),
            nn.Parameter(0.1 * torch.randn(base.out_features, 4)),
        )

    @property
    def weight(self) -> Tensor:
        return self.base.weight + self.alpha * self.b @ self.a

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.base.bias)


class Standardised(nn.Linear):
    """A projection by rows of mean 0 and deviation 0.2."""

    def made(self) -> Tensor:
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return 0.2 * centred / (self.weight.std(1, keepdim=True) + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.made(), self.bias)


class Joined(nn.Module):
    """q, k and v by one matmul with three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(reimplemented.WIDTH, reimplemented.WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q, self.k, self.v)
        return linear(x, torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps]))


class Frozen(nn.Module):
    """A projection by buffers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", base.weight.detach().clone())
        self.register_buffer("bias", base.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _low_rank(model: Any) -> None:
    model.h[0].mlp[0] = LowRank(model.h[0].mlp[0])


def _standardised(model: Any) -> None:
    model.h[0].mlp[0].__class__ = Standardised


def _joined(model: Any) -> None:
    model.h[0].attn.c_attn = Joined()


def _frozen(model: Any) -> None:
    model.h[0].mlp[0] = Frozen(model.h[0].mlp[0])


def _old_weight_norm(model: Any) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.h[0].mlp[0])


WAYS: dict[str, Callable[[Any], Any]] = {
    "weight_norm": lambda model: parametrizations.weight_norm(model.h[0].mlp[0]),
    "weight_norm of q, k, v": lambda model: parametrizations.weight_norm(model.h[0].attn.c_attn),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model.h[0].mlp[0]),
    "orthogonal": lambda model: parametrizations.orthogonal(model.h[0].mlp[0]),
    "the old weight_norm": _old_weight_norm,
    "low rank": _low_rank,
    "joined": _joined,
    "buffers": _frozen,
}


def changed(name: str) -> Any:
    model = Model()
    WAYS[name](model)
    return model


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("computed", [(True, False), (False, True), (True, True)])
def test_a_computed_weight_is_mapped(name: str, computed: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    found = compared(*(changed(name) if each else Model() for each in computed))
    assert found.differences == ()
    assert found.parts[0].how == "whole"
    assert found.parts[0].figures["largest"] < 1e-12
    assert found.weights is not None
    assert found.weights["only_a"] == found.weights["only_b"] == found.weights["guessed"] == []


def pair(change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A plain model and one that computes a weight, with the same weights up to the rounding of float32."""
    model: Any = Model()
    change(model)
    plain: Any = Model()
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        model(IDS)
        for ours, theirs in (
            (plain.h[0].mlp[0], model.h[0].mlp[0]),
            (plain.h[0].attn.c_attn, model.h[0].attn.c_attn),
        ):
            made = theirs.made() if isinstance(theirs, Standardised) else theirs.weight
            ours.weight.copy_(made)
            ours.bias.copy_(theirs.base.bias if isinstance(theirs, LowRank) else theirs.bias)
    return plain.eval(), model.eval()


@pytest.mark.parametrize(
    ("name", "order"),
    thinned([*(name for name in WAYS if name not in ("joined", "buffers")), "standardised"], [1, -1]),
)
def test_a_merged_weight_hides_no_other_difference(name: str, order: int) -> None:
    torch.manual_seed(0)
    models = pair({**WAYS, "standardised": _standardised}[name])
    assert compared(*models[::order]).differences == ()
    models[1].h[1].ln_1.eps = 1e-2
    (difference,) = compared(*models[::order]).differences
    assert (difference.name, difference.sites, difference.confirmed) == (
        "norm-eps",
        (("h.1.attn", "h.1.attn"),),
        True,
    )


@pytest.mark.parametrize("name", ["weight_norm", "the old weight_norm"])
def test_weights_of_B_that_are_computed_are_noted(name: str) -> None:
    notes = compared(Model(), changed(name)).notes
    assert any(n.startswith("B computes these weights") and n.endswith(": h.0.mlp.0.weight.") for n in notes)
    assert not any("B computes these weights" in note for note in compared(changed(name), Model()).notes)


def test_two_that_compute_a_weight_from_the_same_parameters_in_other_ways_differ() -> None:
    a, b = changed("low rank"), changed("low rank")
    b.h[0].mlp[0].alpha = 2.0
    assert [each.sites for each in compared(a, b).differences] == [(("h.0.mlp", "h.0.mlp"),)]
    standardised = Model()
    _standardised(standardised)
    for models in ((standardised, Model()), (Model(), standardised)):
        assert [each.sites for each in compared(*models).differences] == [(("h.0.mlp", "h.0.mlp"),)]


def test_a_merged_weight_that_is_wrong_is_named() -> None:
    torch.manual_seed(0)
    plain, model = pair(_low_rank)
    plain.h[0].mlp[0].weight.data.copy_(model.h[0].mlp[0].base.weight)  # merged without b·a
    (difference,) = compared(plain, model).differences
    assert difference.name == "weights"
    assert "h.0.mlp.0.base.weight with h.0.mlp.0.b and h.0.mlp.0.a" in difference.message


def test_quantised_maps_are_named_and_the_structure_is_compared() -> None:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    found = normscope.diff(model, small, batch=IDS, parts="structure,function")
    parts = {each.part: each for each in found.parts}
    assert parts[Part.FUNCTION].how == "not"
    assert "has quantised maps, which do not run in float64: h.0.attn.c_attn," in parts[Part.FUNCTION].why[0]
    assert parts[Part.FUNCTION].why[0].startswith("B ")
    assert parts[Part.STRUCTURE].how != "not"
