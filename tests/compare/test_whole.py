"""Models that agree as a whole: what the function part settles of the structure, and how it knows."""

import copy
from typing import Any

import made
import pytest
import torch
from made import Options
from torch import Tensor, nn

import normscope
from normscope.compare import Diff, structure
from normscope.compare.types import Part

WRONG = {"qk_norm": "head", "norm": "batchnorm", "head_cap": 3.0, "parallel": True, "final_norm": "none"}
"""Facts that are read wrongly of one side, at each level of a structure."""
KEPT = {"attention_dropout": 0.3, "window": 64}
"""Facts that equal functions do not settle."""


def compared(a: Any, b: Any, **options: Any) -> Diff:
    """Structure and function."""
    return normscope.diff(a, b, parts="structure,function", batch=made.batch(), reraise=True, **options)


def misread(monkeypatch: pytest.MonkeyPatch, path: str, facts: dict[str, Any]) -> None:
    """Let the reading of models whose modules are called `path` have these facts where it has such."""
    own = structure._Reader.model

    def model(self: Any) -> Any:
        place = own(self)
        return spoilt(place) if path in self.modules else place

    def spoilt(place: Any) -> Any:
        wrong = {name: value for name, value in facts.items() if name in place.facts}
        parts = tuple(map(spoilt, place.parts))
        return type(place)(place.level, place.name, {**place.facts, **wrong}, parts)

    monkeypatch.setattr(structure._Reader, "model", model)


class Wrapped(nn.Module):
    """A model under another name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids)


def two() -> tuple[nn.Module, nn.Module]:
    """A model and its copy with modules of other names."""
    model = made.made("plain", Options())
    return model, Wrapped(copy.deepcopy(model))


@pytest.mark.parametrize("fact", WRONG)
def test_a_fact_that_is_read_wrongly_is_no_difference_of_equal_functions(
    monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    a, b = two()
    misread(monkeypatch, "inner", {fact: WRONG[fact]})
    assert compared(a, b).differences == ()
    notes = [note for note in compared(a, b).notes if "whatever their weights" in note]
    assert len(notes) == 1
    alone = normscope.diff(a, b, parts="structure", batch=made.batch(), reraise=True)
    assert [each.name for each in alone.differences] == [fact.replace("_", "-")]


@pytest.mark.parametrize("how", ["a loose tolerance", "one token"])
def test_a_comparison_that_shows_little_settles_nothing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    a, b = two()
    misread(monkeypatch, "inner", {"norm": "batchnorm"})
    loose, batch = (1e-3, made.batch()) if how == "a loose tolerance" else (None, made.batch()[:, :1])
    found = normscope.diff(a, b, parts="structure,function", batch=batch, rtol=loose, reraise=True)
    assert [each.name for each in found.differences] == ["norm"]


@pytest.mark.parametrize("fact", KEPT)
def test_what_a_batch_does_not_show_is_kept(monkeypatch: pytest.MonkeyPatch, fact: str) -> None:
    a, b = two()
    misread(monkeypatch, "inner", {fact: KEPT[fact]})
    assert [each.name for each in compared(a, b).differences] == [fact.replace("_", "-")]


def test_beside_a_difference_only_its_block_keeps_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two()
    eps = next(m for name, m in b.named_modules() if isinstance(m, nn.LayerNorm) and ".1." in f"{name}.")
    eps.eps = 1e-3
    misread(monkeypatch, "inner", {"activation": "tanh", "head_cap": 3.0})
    found = compared(a, b)
    assert [each.name for each in found.of(Part.FUNCTION)] == ["norm-eps"]
    assert [each.name for each in found.of(Part.STRUCTURE)] == ["activation", "norm-eps"]
    (beside,) = [note for note in found.notes if "whatever their weights" in note]
    assert "soft cap" in beside


class Layers(nn.Module):
    """Three feed-forwards; the gradient of their hidden layers may be cut, positions of zeros added."""

    def __init__(self, *, is_cut: bool = False, is_zero: bool = False, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(32, 16, generator=generator))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.ups = nn.ParameterList(torch.randn(16, 32, generator=generator) / 4 for _ in range(3))
        self.downs = nn.ParameterList(torch.randn(32, 16, generator=generator) / 6 for _ in range(3))
        self.positions = nn.Parameter(torch.zeros(8, 16)) if is_zero else None
        self.is_cut = is_cut

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids] if self.positions is None else self.table[ids] + self.positions
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            hidden = (norm(x) @ up).relu()
            x = x + (hidden.detach() if self.is_cut else hidden) @ down
        return x


def test_equal_outputs_with_other_gradients_are_not_the_same() -> None:
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    found = normscope.diff(Layers(), Layers(is_cut=True), parts="function", batch=ids, reraise=True)
    assert found.differences


def test_beside_a_weight_without_a_partner_nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    misread(monkeypatch, "inner", {"norm": "batchnorm"})
    for is_zero, names in ((True, ["norm"]), (False, [])):
        other = Wrapped(Layers(is_zero=is_zero))
        found = normscope.diff(Layers(), other, parts="structure,function", batch=ids, reraise=True)
        assert [each.name for each in found.differences] == names


class Stacked(Layers):
    """The same with the weights of all layers in one tensor each, whose names say nothing."""

    def __init__(self, source: Layers) -> None:
        nn.Module.__init__(self)
        self.z = copy.deepcopy(source.table)
        gains, biases = ([getattr(norm, name) for norm in source.norms] for name in ("weight", "bias"))
        tensors = {"a": gains, "b": biases, "c": source.ups, "d": source.downs}
        for name, each in tensors.items():
            self.register_parameter(name, nn.Parameter(torch.stack(list(each)).detach()))

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.one_hot(ids, len(self.z)).to(self.z.dtype) @ self.z
        for gain, bias, up, down in zip(self.a, self.b, self.c, self.d, strict=True):
            x = x + (nn.functional.layer_norm(x, (16,), gain, bias) @ up).relu() @ down
        return x


@pytest.mark.parametrize("seed", [0, 1])
def test_weights_stacked_over_layers_and_a_table_of_one_hot_rows_are_mapped(seed: int) -> None:
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    found = normscope.diff(
        Layers(), Stacked(Layers(seed=seed)), parts="structure,function", batch=ids, reraise=True
    )
    assert found.differences == ()
    assert found.parts[1].how == "whole", found.parts[1].why
    assert found.parts[1].figures["largest"] < 1e-12
    assert found.weights["only_a"] == []
    assert found.weights["only_b"] == []
