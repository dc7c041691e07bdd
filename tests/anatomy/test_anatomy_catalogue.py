"""Tests that the reading of our models names their scheme, or the class with the same dataflow."""

import math
from typing import Any

import pytest
import torch

from normscope.anatomy import Anatomy, Site, capture, measuring, read_anatomy
from normscope.anatomy.assemble import NO_RESIDUAL_SUM
from normscope.nn import SCHEMES, build
from normscope.nn.placement import Slot, Where
from thinned import thinned

OVER_DEPTH = ["attnres", "block-attnres"]
WITH_STREAM = [name for name in SCHEMES if name not in ("plain", *OVER_DEPTH)]
MODELS = ("decoder", "encoder", "encoder-decoder")
SIZES = [("decoder", 2), ("encoder", 3), ("encoder-decoder", 2)]
KINDS = {
    "decoder": ["attention", "feed-forward"],
    "encoder": ["attention", "feed-forward"],
    "decoder of two": ["attention", "cross-attention", "feed-forward"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap-sinusoidal-no-bias": {"softcap": 20.0, "positions": "sinusoidal", "bias": False, "tie": True},
    "swiglu-rotary-grouped-dropout": {
        "dropout": 0.1,
        "positions": "rotary",
        "activation": "swiglu",
        "kv_heads": 1,
    },
}


def read(model: str, name: str, depth: int, **options: Any) -> Anatomy:
    """The reading of one small model; its weights do not matter."""
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "vocab": 16, "context": 8, "depth": depth, "base_depth": 1}
    return read_anatomy(build(model, scheme=name, **(sizes | options)), ids(model))


def ids(model: str) -> Any:
    """Arguments of the model's call; for two stacks, two texts of different lengths."""
    text = torch.randint(0, 16, (2, 5))
    return (text, text[:, :4]) if model == "encoder-decoder" else text


def names(anatomy: Anatomy) -> set[str]:
    """Names of the branches: their scheme, or else their placement."""
    return {branch.scheme or branch.placement for branch in anatomy.branches}


@pytest.mark.parametrize(("model", "depth"), SIZES)
@pytest.mark.parametrize("name", WITH_STREAM)
def test_a_reading_names_the_scheme(name: str, model: str, depth: int) -> None:
    anatomy = read(model, name, depth)

    assert names(anatomy) == {SCHEMES[name].reads_as}
    assert not anatomy.unread
    final = Slot.FINAL in SCHEMES[name].placement_at(Where(depth, depth, other_depth=depth))
    assert [stack.final_norm is not None for stack in anatomy.stacks] == [final] * len(anatomy.stacks)
    assert [len(stack.blocks) for stack in anatomy.stacks] == [depth] * len(anatomy.stacks)
    for stack in anatomy.stacks:
        kinds = KINDS[
            "decoder of two" if (model, stack.name) == ("encoder-decoder", "decoder") else "encoder"
        ]
        assert [[branch.kind for branch in block.branches] for block in stack.blocks] == [kinds] * depth
    expected = {"decoder": ["decoder"], "encoder": ["encoder"]}.get(model, ["encoder", "decoder"])
    assert [stack.name for stack in anatomy.stacks] == expected


@pytest.mark.parametrize(("name", "options"), thinned(WITH_STREAM, OPTIONS))
def test_options_do_not_change_the_name(name: str, options: str) -> None:
    anatomy = read("decoder", name, 2, **OPTIONS[options])

    assert names(anatomy) == {SCHEMES[name].reads_as}
    assert not anatomy.unread


@pytest.mark.parametrize("depth", [4, 7])
@pytest.mark.parametrize(
    "name", ["mix-ln", "keel", "layernorm-scaling", "siamesenorm", "unit-scaling", "dslm"]
)
def test_what_changes_with_depth_is_named_at_every_depth(name: str, depth: int) -> None:
    assert names(read("decoder", name, depth)) == {name}


@pytest.mark.parametrize("model", MODELS)
def test_a_stack_without_residuals_has_no_branches_and_says_so(model: str) -> None:
    anatomy = read(model, "plain", 3)

    assert not anatomy.stacks
    assert anatomy.unread == (NO_RESIDUAL_SUM,)


@pytest.mark.parametrize(("model", "depth"), SIZES)
@pytest.mark.parametrize("name", OVER_DEPTH)
def test_attention_over_depth_is_no_residual_sum_and_the_reading_says_so(
    name: str, model: str, depth: int
) -> None:
    """Nothing is read rather than something wrong: Block AttnRes has sums, which are no stream."""
    anatomy = read(model, name, depth)

    assert not anatomy.stacks
    (words,) = anatomy.unread
    assert "Attention Residuals" in words


def test_every_name_that_is_read_is_in_the_catalogue() -> None:
    assert {scheme.reads_as for scheme in SCHEMES.values()} <= set(SCHEMES)


@pytest.mark.parametrize("name", WITH_STREAM)
def test_sites_are_found_again(name: str) -> None:
    torch.manual_seed(0)
    model = build("decoder", scheme=name, width=8, heads=2, vocab=16, context=8, depth=2)
    text = ids("decoder")
    anatomy = read_anatomy(model, text)
    sites = {site for block in anatomy.blocks for site in (block.entry, block.exit)}
    for branch in anatomy.branches:
        sites |= {branch.entry, branch.output, branch.sum}
        sites |= {site for norm in branch.norms for site in (norm.input, norm.output)}
        sites |= {projection.output for projection in branch.projections}
    sites |= {stack.hidden for stack in anatomy.stacks}

    with measuring(model):
        logits, found = capture(model, lambda: model(text).logits, sites)

    assert set(found) == sites
    assert {len(found[branch.entry].shape) for branch in anatomy.branches} == {3}
    _assert_flows_on(anatomy, found)
    assert_reaches(logits, [found[branch.output] for branch in anatomy.branches])
    assert {role for b in anatomy.branches for p in b.projections for role in p.roles} == set("qkvo") | {
        "up",
        "down",
    }


def _assert_flows_on(anatomy: Anatomy, found: dict[Site, torch.Tensor]) -> None:
    """Assert that a block's output is the next one's input, unless an earlier point is added between."""
    joined = {skip.into for stack in anatomy.stacks for skip in stack.long_skips}
    for before, after in zip(anatomy.blocks, anatomy.blocks[1:], strict=False):
        if after.path in joined:
            continue
        torch.testing.assert_close(found[before.exit], found[after.entry])


def assert_reaches(loss: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Assert that the logits depend on every branch's output."""
    gradients = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
    assert all(gradient is not None for gradient in gradients)


@pytest.mark.parametrize(("name", "streams"), [("hyper-connections", 4), ("mhc", 4)])
def test_a_state_of_several_streams_is_one_tensor(name: str, streams: int) -> None:
    model = build("decoder", scheme=name, width=8, heads=2, vocab=16, context=8, depth=2)
    text = ids("decoder")
    anatomy = read_anatomy(model, text)

    with measuring(model):
        _, found = capture(model, lambda: model(text), [b.sum for b in anatomy.branches])

    assert {tuple(tensor.shape) for tensor in found.values()} == {(2, 5, streams, 8)}
    assert {branch.join for branch in anatomy.branches} == {"streams"}


@pytest.mark.parametrize(
    ("name", "stream", "branch"),
    [
        ("deepnorm", 6**0.25, None),
        ("depth-mup", None, 1 / 3),
        ("dslm", math.sqrt(2 / 3), math.sqrt(1 / 3)),
        ("rezero", None, "learnt"),
        ("admin", "learnt", None),
        ("gpas", "learnt", "learnt"),
    ],
)
def test_scales_are_read(name: str, stream: Any, branch: Any) -> None:
    anatomy = read("decoder", name, 3)

    for each in anatomy.branches:
        for got, expected in ((each.stream_scale, stream), (each.branch_scale, branch)):
            assert got == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_a_norm_on_q_and_k_alone_is_no_scheme(qk_norm: str) -> None:
    assert names(read("decoder", "pre", 2, qk_norm=qk_norm)) == {"pre"}
    assert names(read("decoder", "res-post", 2, qk_norm=qk_norm)) == {
        "olmo2" if qk_norm == "full" else "res-post"
    }


@pytest.mark.parametrize("model", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize(
    "options",
    [
        {"value_residual": "half"},
        {"value_residual": "learnt", "kv_heads": 1, "positions": "rotary"},
        {"attention_gate": "head"},
        {"attention_gate": "element"},
    ],
)
def test_options_of_attention_do_not_change_the_reading(model: str, options: dict[str, Any]) -> None:
    """The values of block 1 make no cross-attention, and a gate's map has a role of its own."""
    anatomy, plain = read(model, "pre", 3, **options), read(model, "pre", 3)

    assert names(anatomy) == {"pre"}
    assert not anatomy.unread
    assert [b.kind for b in anatomy.branches] == [b.kind for b in plain.branches]
    gate = {"gate"} if "attention_gate" in options else set()
    for branch in anatomy.branches:
        if branch.kind != "feed-forward":
            assert {role for p in branch.projections for role in p.roles} == set("qkvo") | gate


@pytest.mark.parametrize("norm", ["rmsnorm", "rmsnorm-plus-one", "layernorm"])
def test_the_kind_of_norm_does_not_change_the_name(norm: str) -> None:
    for name in ("pre", "post", "keel", "hybridnorm", "siamesenorm", "hyper-connections"):
        assert names(read("decoder", name, 2, norm=norm)) == {name}


@pytest.mark.parametrize("norm", ["batchnorm", "groupnorm"])
@pytest.mark.parametrize("model", ["encoder", "vision"])
def test_norms_over_tokens_are_read(model: str, norm: str) -> None:
    torch.manual_seed(0)
    text, image = {"vocab": 16, "context": 8}, {"image": 8, "patch": 4, "classes": 5}
    built = build(model, norm=norm, depth=2, width=32, heads=4, **(text if model == "encoder" else image))
    anatomy = read_anatomy(built, ids(model) if model == "encoder" else torch.randn(2, 3, 8, 8))

    assert {(branch.placement, branch.norm) for branch in anatomy.branches} == {("pre", norm)}
    assert anatomy.final_norm
    assert not anatomy.unread
