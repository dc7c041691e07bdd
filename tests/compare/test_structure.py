"""Structure: one change is one difference, however the two models are written; a refactoring is none."""

import dataclasses
from typing import Any

import pytest
from made import (
    DEPTH,
    WAYS,
    Complex,
    Einsums,
    Functions,
    Loops,
    Options,
    TorchAttention,
    TorchLayers,
    batch,
    differences,
    made,
    place_of,
    with_attention,
)
from torch import nn

from normscope.anatomy import read_anatomy
from normscope.compare.structure import read_for_structure, structure_of, structure_of_report
from normscope.subjects import load, make_subject

CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ε": ({"eps": 1e-6}, {"norm-eps", "final-norm-eps"}),
    "bias": ({"bias": False}, {"bias"}),
    "GELU": ({"activation": "tanh"}, {"activation"}),
    "scale": ({"scale": 0.2}, {"attention-scale"}),
    "cap": ({"cap": 30.0}, {"logit-cap"}),
    "rotary": ({"rotary": "halves"}, {"attention-positions"}),
    "window": ({"window": 8}, {"window"}),
    "strictly causal": ({"own": False}, {"own-key"}),
    "not causal": ({"causal": False}, {"causal"}),
    "dropout": (
        {"dropout": 0.1},
        {"embedding-dropout", "attention-dropout", "output-dropout"},
    ),
    "untied": ({"tied": False}, {"tied-head"}),
    "no final norm": ({"final_norm": False}, {"final-norm"}),
    "embedding √d": ({"embedding_scale": 32**0.5}, {"embedding-scale"}),
    "no positions": ({"positions": False}, {"positions"}),
    "branch scale": ({"branch_scale": 0.5}, {"branch-scale"}),
    "hidden": ({"hidden": 96}, {"hidden-width"}),
    "heads": ({"heads": 2}, {"heads"}),
    "RMSNorm": ({"rms": True}, {"norm", "final-norm"}),
    "Post-LN": ({"post": True, "final_norm": False}, {"placement", "final-norm"}),
    "depth": ({"depth": DEPTH - 1}, {"blocks"}),
}
ROTARY = Options(rotary="halves", positions=False)


@pytest.mark.parametrize("other", [way for way in WAYS if way != "plain"])
@pytest.mark.parametrize("change", ["none", *CHANGES])
def test_a_model_and_its_refactoring_do_not_differ(change: str, other: str) -> None:
    options = Options(**CHANGES[change][0]) if change in CHANGES else Options()
    assert differences(made("plain", options), made(other, options, seed=1)) == ()


@pytest.mark.parametrize("kind", [TorchAttention, Loops, Einsums])
def test_attentions_of_other_codes_are_the_same(kind: type[nn.Module]) -> None:
    assert differences(made("plain", Options()), with_attention(kind, Options())) == ()


def test_biases_after_the_residual_sums_are_the_branches() -> None:
    assert differences(made("plain", Options()), Functions(Options())) == ()


def test_complex_numbers_turn_neighbours() -> None:
    options = dataclasses.replace(ROTARY, rotary="neighbours")
    assert differences(made("plain", options), with_attention(Complex, options)) == ()


def test_layers_of_pytorch_and_their_second_dropout() -> None:
    assert differences(made("plain", Options()), TorchLayers(Options())) == ()
    options = Options(dropout=0.1)
    found = differences(made("plain", options), TorchLayers(options))
    assert {each.name for each in found} == {"embedding-dropout", "hidden-dropout"}


@pytest.mark.parametrize("other", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_one_change_is_found_in_any_writing(change: str, other: str) -> None:
    changed, names = CHANGES[change]
    found = differences(made("plain", Options()), made(other, Options(**changed)))
    assert {each.name for each in found} == names, [each.message for each in found]


@pytest.mark.parametrize(
    ("changed", "name", "values"),
    [
        ({"rotary": "neighbours"}, "rotary-layout", ("halves", "neighbours")),
        ({"base": 500_000.0}, "rotary-base", (10_000.0, 500_000.0)),
    ],
)
@pytest.mark.parametrize("other", ["plain", "flat"])
def test_rotary_positions_are_read_from_what_they_do(
    changed: dict[str, Any], name: str, values: tuple[Any, Any], other: str
) -> None:
    a, b = made("plain", ROTARY), made(other, dataclasses.replace(ROTARY, **changed))
    (found,) = differences(a, b)
    assert (found.name, (found.a, found.b)) == (name, values)
    assert len(found.sites) == DEPTH


def test_a_change_in_one_layer_stays_there() -> None:
    a, b = made("plain", Options()), made("plain", Options())
    b.get_submodule("layers.1.mlp").o = Options(activation="relu")  # type: ignore[assignment]
    (found,) = differences(a, b)
    assert found.name == "activation"
    assert found.sites == (("layers.1.mlp", "layers.1.mlp"),)
    assert found.message == "The activation is gelu in A and relu in B."


def test_a_deleted_layer_is_one_difference() -> None:
    a, b = made("plain", Options()), made("plain", Options())
    layers = b.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    del layers[1]
    (found,) = differences(a, b)
    assert found.name == "blocks"


def test_reading_a_structure_records_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("plain", Options(dropout=0.1)).train()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    subject = make_subject(model, batch())
    del calls[:]
    anatomy = read_for_structure(subject)
    structure_of(subject, anatomy)
    assert len(calls) == 1
    assert model.training
    assert anatomy == read_anatomy(subject)


def test_a_report_gives_the_placements() -> None:
    model = made("plain", Options())
    report = {"anatomy": read_anatomy(model, batch()).to_dict()}
    place = structure_of_report(report)
    whole = place_of(model)
    branches = [
        [(branch.name, branch.facts["placement"]) for block in each.parts[0].parts for branch in block.parts]
        for each in (place, whole)
    ]
    assert branches[0] == branches[1]


def test_a_model_without_elements_has_a_structure() -> None:
    subject = load("nn:decoder,depth=2,width=32,heads=2", fake=True)
    place = structure_of(subject, read_for_structure(subject))
    facts = place.parts[0].parts[0].parts[0].facts
    assert (facts["heads"], facts["norm_eps"], facts["bias"]) == (2, 1e-5, ["q", "k", "v", "o"])
