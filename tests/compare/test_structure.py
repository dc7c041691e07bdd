"""Structure: one change is one difference, however the two models are written; a refactoring is none."""

import dataclasses
from typing import Any

import pytest
import torch
from made import (
    DEPTH,
    WAYS,
    WIDTH,
    Block,
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
from torch import Tensor, nn

from normscope import diff
from normscope.anatomy import read_anatomy
from normscope.compare.align import align
from normscope.compare.differences import compare_structures
from normscope.compare.structure import read_for_structure, structure_of, structure_of_report
from normscope.nn import SCHEMES
from normscope.subjects import load, make_subject
from normscope.subjects.found_loss import TIME_FIRST
from thinned import thinned

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


IN_ONE_LAYER: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("mlp", {"activation": "relu"}, "activation"),
    "scale": ("attn", {"scale": 0.2}, "attention-scale"),
    "cap": ("attn", {"cap": 30.0}, "logit-cap"),
    "base": ("attn", {"base": 500_000.0}, "rotary-base"),
    "layout": ("attn", {"rotary": "neighbours"}, "rotary-layout"),
    "window": ("attn", {"window": 8}, "window"),
}


@pytest.mark.parametrize("change", IN_ONE_LAYER)
@pytest.mark.parametrize("layer", range(DEPTH))
def test_a_change_in_one_layer_stays_there(change: str, layer: int) -> None:
    """Like layers are read once, and this one is not like them."""
    part, changed, name = IN_ONE_LAYER[change]
    a, b = made("plain", ROTARY), made("plain", ROTARY)
    site = f"layers.{layer}.{part}"
    b.get_submodule(site).o = dataclasses.replace(ROTARY, **changed)  # type: ignore[assignment]
    (found,) = differences(a, b)
    assert (found.name, found.sites) == (name, ((site, site),))


def test_a_slope_of_one_layer_is_read_from_its_elements() -> None:
    """The layers run the same ops, and only the content of a parameter differs."""
    a, b = made("plain", Options()), made("plain", Options())
    for model in (a, b):
        for n in range(DEPTH):
            up = model.get_submodule(f"layers.{n}.mlp.up")
            model.get_submodule(f"layers.{n}.mlp").up = nn.Sequential(up, nn.PReLU())
            model.get_submodule(f"layers.{n}.mlp").o = Options(activation="relu")  # type: ignore[assignment]
    assert differences(a, b) == ()
    nn.init.constant_(b.get_parameter("layers.2.mlp.up.1.weight"), -1.0)
    (found,) = differences(a, b)
    assert (found.name, found.sites) == ("activation", (("layers.2.mlp", "layers.2.mlp"),))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_a_structure(scheme: str) -> None:
    subject = load(f"nn:decoder,scheme={scheme},depth=2,width=16,heads=2", batch_size=2, seq_len=8)
    place = structure_of(subject, read_for_structure(subject))
    assert "unread" not in place.facts
    assert compare_structures(align(place, place)) == ()


class NormedAttention(Block):
    """The residual around the attention is the norm's output."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        x = h + self.attn(h)
        return x + self.mlp(self.ln2(x))


class NormedMlp(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        h = self.ln2(x)
        return h + self.mlp(h)


class NormedBoth(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        h = self.ln2(h + self.attn(h))
        return h + self.mlp(h)


class NormedAlongFunctions(Functions):
    """The residuals around the attentions are the norms' outputs, in one module with all norms in a list."""

    def normed(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        h = self.norms[2 * n](x)
        return h, h


def test_a_residual_from_the_norms_output_is_named_where_no_path_shows_the_block() -> None:
    a, b = (make(Options()) for make in (Functions, NormedAlongFunctions))
    b.load_state_dict(a.state_dict())
    for one, two, values in ((a, b, ("stream", "norm")), (b, a, ("norm", "stream"))):
        found = diff(one, two, parts="structure,function").differences
        assert [(each.name, each.a, each.b) for each in found] == [("residual-source", *values)] * 2
        assert [len(each.sites) for each in found] == [DEPTH] * 2


class Parallel(Block):
    """Attention and feed-forward read the same input (GPT-J has one norm for both, GPT-NeoX two)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln1(x)) + self.mlp(self.ln2(x))


class ParallelWithOneNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        return x + (self.attn(h) + self.mlp(h))


def with_layers(kind: type[Block], *layers: int) -> nn.Module:
    model = made("plain", Options())
    for layer in layers:
        model.get_submodule(f"layers.{layer}").__class__ = kind
    return model


@pytest.mark.parametrize(
    ("changed", "layers"),
    thinned(
        [(NormedAttention, ["attn"]), (NormedMlp, ["mlp"]), (NormedBoth, ["attn", "mlp"])],
        [*((n,) for n in range(DEPTH)), tuple(range(DEPTH))],
    ),
)
def test_a_residual_from_the_norms_output_is_named(
    changed: tuple[type[Block], list[str]], layers: tuple[int, ...]
) -> None:
    """The other layers, the embeddings and the final norm stay as they are, in both parts."""
    kind, branches = changed
    found = diff(made("plain", Options()), with_layers(kind, *layers), parts="structure,function")
    sites = tuple((f"layers.{layer}.{branch}",) * 2 for layer in layers for branch in branches)
    assert [(each.name, each.sites) for each in found.differences] == [("residual-source", sites)] * 2
    assert found.differences[1].is_first
    assert found.differences[1].confirmed
    assert found.differences[1].message in found.parts[1].said


@pytest.mark.parametrize("layers", [(1,), tuple(range(DEPTH))])
@pytest.mark.parametrize("kind", [Parallel, ParallelWithOneNorm])
def test_parallel_branches_are_named(kind: type[Block], layers: tuple[int, ...]) -> None:
    (found,) = differences(made("plain", Options()), with_layers(kind, *layers))
    assert (found.name, found.a, found.b) == ("parallel", False, True)
    assert found.sites == tuple((f"layers.{n}",) * 2 for n in layers)


@pytest.mark.parametrize("scheme", ["post", "mix-ln", "deepnorm", "b2t", "res-post", "peri"])
def test_norms_on_the_stream_are_not_taken_for_the_branches_own(scheme: str) -> None:
    subject = load(f"nn:decoder,scheme={scheme},depth=4,width=16,heads=2", batch_size=2, seq_len=8)
    anatomy = read_for_structure(subject)
    place = structure_of(subject, anatomy)
    branches = [branch.facts for block in place.parts[0].parts for branch in block.parts]
    assert [each["placement"] for each in branches] == [
        each.placement for block in anatomy.blocks for each in block.branches
    ]
    assert {each["residual_source"] for each in branches} == {"stream"}


class TimeFirst(nn.Module):
    """An encoder of PyTorch, which takes (T, B) unless told otherwise."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(64, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.0, batch_first=batch_first)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        where = self.positions(torch.arange(ids.shape[self.batch_first]))
        return self.head(self.stack(self.tokens(ids) + (where if self.batch_first else where[:, None])))


def test_a_model_that_takes_time_first_gets_it() -> None:
    found = diff(TimeFirst(), TimeFirst(batch_first=True), parts="structure")
    assert found.is_same, found
    assert found.notes == (f"A: {TIME_FIRST}",)


def test_a_comparison_without_a_check_needs_three_forwards_of_a_bare_model() -> None:
    """One forward finds the vocabulary, one checks the batch, one is read; no loss is needed."""
    models, calls = [made("plain", Options(), seed) for seed in (0, 1)], []
    for model in models:
        model.register_forward_hook(lambda *_: calls.append(1))
    diff(*models, parts="structure,recipe")
    assert len(calls) <= 6


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
