"""Reasons: each is planted in models written by hand, found at its place, and undone.

The criteria: the first reason has the planted name, all places have it and no other, each is confirmed, and B
with the patches computes what A does. A model against another way of writing it gives no reason.
"""

from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import BASES, Options, batch, tiny

from normscope.compare.formulas import norm
from normscope.compare.holdings import Holdings, holdings_of
from normscope.compare.reasons import joins
from normscope.compare.reasons.norms import fitted_norm
from normscope.compare.reasons.scene import Half, Scene, distance
from normscope.compare.reasons.scenes import Walked, map_of
from normscope.compare.reasons.search import Search, grouped, search
from normscope.compare.rows import rows_of
from normscope.compare.twins import without_constants
from normscope.compare.walk import Twin, twin_of
from normscope.subjects import make_subject
from thinned import thinned

Side = tuple[Twin, Holdings]


def opened(base: str, changes: dict[str, Any]) -> Side:
    twin = twin_of(make_subject(tiny(BASES[base], changes), batch(BASES[base])))
    return twin, holdings_of(twin)


@cache
def plain(base: str) -> Side:
    return opened(base, {})


def searched(a: Side, b: Side) -> Search:
    (twin_a, holdings_a), (twin_b, holdings_b) = a, b
    weights_a = {held.name: held.value for held in without_constants(holdings_a).held}
    own = {held.name: held.value for held in holdings_b.held}
    same = {n for n, value in own.items() if n in weights_a and weights_a[n].shape == value.shape}
    weights_b = {name: weights_a[name] for name in same}
    ids = batch(Options())
    steps = twin_a.walk(ids, weights_a)
    result = search(
        Walked(map_of(holdings_a), steps, weights_a),
        map_of(holdings_b),
        own | weights_b,
        lambda patches: twin_b.walk(ids, weights_b, patches, gradients=False),
        rows_of(None, twin_a.anatomy, twin_b.anatomy).to_a,
        last=lambda patches: twin_b.walk(ids, weights_b, patches),
    )
    result.steps_a = steps  # type: ignore[attr-defined]
    return result


def worst_gradient(result: Search) -> float:
    """Largest relative difference of the gradients in the streams of both sides, all undone."""
    a = {step.key: step.gradient for step in result.steps_a}  # type: ignore[attr-defined]
    names = ("entry", "embedding")
    pairs = [
        (a.get(s.key), s.gradient)
        for s in result.steps
        if s.key[3] in names and not (s.key[2] > 0 and "parallel" in names_of(result))
    ]
    return max(distance(x, y) for x, y in pairs if x is not None and y is not None)


def names_of(result: Search) -> set[str]:
    return {each.reason.name for each in result.found}


def names(result: Search) -> list[str]:
    return list(dict.fromkeys(group[0].reason.name for group in grouped(result.found)))


ALL, CAUSAL, TABLES = "gpt llama bert", "gpt llama", "gpt bert"
PLANTS: list[tuple[str, dict[str, Any], list[str]]] = [
    (ALL, {"eps": 1e-3}, ["norm-eps", "final-norm-eps"]),
    (ALL, {"eps": 1e-3, "only": 1}, ["norm-eps"]),
    (TABLES, {"norm": "rmsnorm"}, ["norm", "final-norm"]),
    ("llama", {"norm": "layernorm"}, ["norm", "final-norm"]),
    (ALL, {"plus_one": True}, ["norm-offset", "final-norm-offset"]),
    (CAUSAL, {"placement": "post"}, ["placement"]),
    (CAUSAL, {"placement": "res-post"}, ["placement"]),
    ("bert", {"placement": "pre"}, ["placement"]),
    (ALL, {"placement": "peri"}, ["placement"]),
    (CAUSAL, {"final_norm": False}, ["final-norm"]),
    ("llama", {"rotary": "interleaved"}, ["rotary-layout"]),
    ("llama", {"base": 500.0}, ["rotary-base"]),
    ("llama", {"rotary": None}, ["attention-positions"]),
    (TABLES, {"rotary": "halves"}, ["attention-positions"]),
    (TABLES, {"position_offset": 2}, ["position-offset"]),
    (TABLES, {"positions": False}, ["positions"]),
    (ALL, {"embedding_scale": 32**0.5}, ["embedding-scale"]),
    (TABLES, {"activation": "gelu-tanh"}, ["activation"]),
    (TABLES, {"activation": "quick"}, ["activation"]),
    ("llama", {"activation": "gelu", "only": 0}, ["activation"]),
    ("llama", {"swapped": True}, ["gate-up"]),
    (TABLES, {"bias": False}, ["bias"]),
    (TABLES, {"o_bias": False}, ["bias"]),
    ("llama", {"bias": True}, ["bias"]),
    (ALL, {"scale": 1 / 8}, ["attention-scale"]),
    (ALL, {"scale": 1.0, "only": 1}, ["attention-scale"]),
    (ALL, {"cap": 5.0}, ["logit-cap"]),
    (CAUSAL, {"causal": False}, ["causal"]),
    ("bert", {"causal": True}, ["causal"]),
    (CAUSAL, {"window": 4}, ["window"]),
    (CAUSAL, {"ahead": 1}, ["mask"]),
    (ALL, {"alibi": True}, ["attention-positions"]),
    (ALL, {"qk_norm": True}, ["qk-norm"]),
    (ALL, {"extra_key": True}, ["softmax"]),
    ("llama", {"repeat": "tile"}, ["kv-groups"]),
    (ALL, {"split": "interleaved"}, ["head-split"]),
    (ALL, {"split": "unmoved"}, ["head-split"]),
    (ALL, {"merge": "unmoved"}, ["head-merge"]),
    (ALL, {"merge": "interleaved"}, ["head-merge"]),
    (ALL, {"head_order": (1, 0, 3, 2)}, ["head-order"]),
    (ALL, {"head_order": (1, 2, 3, 0)}, ["head-order"]),
    (ALL, {"branch_scale": 0.5}, ["branch-scale"]),
    (ALL, {"branch_scale": 2.0, "only": 0}, ["branch-scale"]),
    (ALL, {"stream_scale": 0.7}, ["stream-scale"]),
    (ALL, {"output_scale": 0.25}, ["head-scale"]),
    (ALL, {"output_cap": 3.0}, ["head-cap"]),
    ("llama", {"eps": 1e-3, "base": 500.0}, ["norm-eps", "rotary-base", "final-norm-eps"]),
    ("gpt", {"activation": "relu", "scale": 0.1, "only": 1}, ["attention-scale", "activation"]),
    ("bert", {"branch_scale": 0.5, "activation": "silu"}, ["branch-scale", "activation"]),
    ("gpt bert", {"heads": 8, "kv_heads": 8}, ["heads"]),
    ("gpt bert", {"heads": 1, "kv_heads": 1, "eps": 1e-3}, ["norm-eps", "heads", "final-norm-eps"]),
    ("gpt bert", {"late_bias": True, "eps": 1e-3}, ["norm-eps", "final-norm-eps"]),
    ("gpt bert", {"late_bias": True, "activation": "relu"}, ["activation"]),
    ("gpt llama", {"parallel": True}, ["parallel"]),
    ("phi", {"parallel": False}, ["parallel"]),
    ("gpt", {"parallel": True, "activation": "relu", "only": 1}, ["parallel", "activation"]),
    ("phi", {"activation": "relu"}, ["activation"]),
    ("phi", {"scale": 0.1, "only": 1}, ["attention-scale"]),
    ("phi", {"o_bias": False}, ["bias"]),
    ("phi", {"branch_scale": 0.5}, ["branch-scale"]),
    ("phi", {"eps": 1e-3, "activation": "silu"}, ["norm-eps", "activation", "final-norm-eps"]),
]
CASES = [(base, changes, wanted) for bases, changes, wanted in PLANTS for base in bases.split()]
THIRD = [
    (ALL.split()[row % 3], changes, wanted)
    for row, (bases, changes, wanted) in enumerate(PLANTS)
    if bases == ALL
]
"""A base for each difference that all three have; it runs always in the other two."""


@pytest.mark.parametrize(
    ("base", "changes", "wanted"),
    [pytest.param(*case, marks=pytest.mark.slow if case in THIRD else ()) for case in CASES],
    ids=lambda value: str(value),
)
def test_a_planted_difference_is_found_and_undone(
    base: str, changes: dict[str, Any], wanted: list[str]
) -> None:
    result = searched(plain(base), opened(base, changes))
    found = names(result)
    # A model without a final norm has no ε of one.
    has_final = base != "bert"
    expected = [name for name in wanted if has_final or not name.startswith("final-norm")]
    assert sorted(found) == sorted(expected)
    assert found[0] == expected[0]
    assert all(each.is_confirmed for each in result.found)
    assert result.is_explained
    assert result.forwards <= 5
    assert worst_gradient(result) < 1e-7
    if "only" in changes:
        assert {each.b[1] for each in result.found} == {changes["only"]}


@pytest.mark.parametrize(
    ("base", "changes", "wanted"), [CASES[n] for n in range(0, len(CASES), 4)], ids=lambda value: str(value)
)
def test_a_planted_difference_of_a_is_found_too(
    base: str, changes: dict[str, Any], wanted: list[str]
) -> None:
    result = searched(opened(base, changes), plain(base))
    assert names(result)[0] == wanted[0]
    assert result.is_explained


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("style", ["sdpa", "softmax", "einsum", "batched", "folded", "convolutions"])
def test_another_way_of_writing_gives_no_reason(base: str, style: str) -> None:
    result = searched(plain(base), opened(base, {"style": style}))
    assert result.found == []
    assert result.is_explained
    assert result.forwards == 2


_OF_LOGITS = ("attention-scale", "logit-cap", "causal", "window", "mask", "qk-norm", "attention-positions")
_FOLDED = [case for case in CASES if case[2][0] in (*_OF_LOGITS, "softmax")]


@pytest.mark.parametrize(("case", "style"), thinned(_FOLDED, ["batched", "folded"]), ids=str)
def test_a_planted_difference_is_found_where_heads_are_folded_into_the_batch(
    case: tuple[str, dict[str, Any], list[str]], style: str
) -> None:
    base, changes, wanted = case
    result = searched(plain(base), opened(base, changes | {"style": style}))
    assert names(result) == wanted
    assert all(each.is_confirmed for each in result.found)
    assert result.is_explained


@pytest.mark.parametrize("base", ["gpt", "bert", "phi"])
@pytest.mark.parametrize("activation", ["gelu-tanh", "quick", "silu", "relu", "squared"])
def test_an_activation_between_convolutions_is_named(base: str, activation: str) -> None:
    result = searched(plain(base), opened(base, {"activation": activation, "style": "convolutions"}))
    assert names(result) == ["activation"]
    assert all(each.is_confirmed for each in result.found)
    assert result.is_explained


@pytest.mark.parametrize("base", ["gpt", "bert"])
def test_a_bias_that_is_added_after_the_sum_gives_no_reason(base: str) -> None:
    result = searched(plain(base), opened(base, {"late_bias": True}))
    assert result.found == []
    assert result.is_explained


@pytest.mark.parametrize(("rotary", "first"), thinned(["halves", "interleaved"], [False, True]))
def test_a_norm_behind_the_rotation_is_named(rotary: str, first: bool) -> None:
    sides = ({"rotary": rotary, "qk_norm": True, "turned_first": each} for each in (first, not first))
    result = searched(*(opened("llama", changes) for changes in sides))
    assert names(result) == ["qk-norm"]
    assert all(each.is_confirmed for each in result.found)
    assert result.is_explained


@pytest.mark.parametrize("base", BASES)
def test_dropout_that_is_left_on_is_named(base: str) -> None:
    result = searched(plain(base), opened(base, {"dropout": 0.2}))
    assert names(result) == ["dropout-left-on"]
    assert result.is_explained


@pytest.mark.parametrize("base", BASES)
def test_an_unknown_difference_says_so_and_hides_no_other(base: str) -> None:
    a, b = plain(base), opened(base, {"embedding_scale": 3.0})
    twin = b[0]
    down = twin.model.blocks[1].mlp.down_proj
    down.register_forward_hook(lambda module, args, output: output + output.sin() ** 2)
    result = searched(a, b)
    assert names(result) == ["embedding-scale", "unknown"]
    assert "for no known reason. Tried: norms" in result.found[-1].reason.message
    assert result.found[-1].b == (0, 1, 1)
    assert result.forwards == 3  # both are seen at once, since every branch reads A's stream


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("is_biased", [True, False])
def test_gain_and_bias_of_a_norm_are_read_from_its_tensors(kind: str, is_biased: bool) -> None:
    """Any norm may have a bias, under any name."""
    generator = torch.Generator().manual_seed(2)
    x, gain, bias = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (20, 1, 1))
    y = norm(x, x, kind=kind, eps=1e-5, weight=gain[0], bias=bias[0] if is_biased else None)
    options = fitted_norm(x, y, kind, 1e-5)
    assert options is not None
    assert torch.allclose(norm(x, x, **options), y)
    assert distance(options["weight"], gain[0]) < 1e-9
    other = fitted_norm(x, y, {"layernorm": "rmsnorm", "rmsnorm": "layernorm"}[kind], 1e-5)
    assert other is None


def test_heads_whose_projections_have_other_widths_are_named() -> None:
    result = searched(plain("gpt"), opened("gpt", {"heads": 8, "kv_heads": 4, "fused": False}))
    assert "heads" in names(result)


def others(base: str, **changes: Any) -> tuple[str, ...]:
    (group,) = grouped(searched(plain(base), opened(base, changes)).found)
    return group[0].reason.others


def test_which_of_two_equal_residuals_is_read_does_not_hang_on_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    stream, branch = (torch.randn(2, 8, 16, dtype=torch.float64, generator=generator) for _ in range(2))

    def half(scale: float, rounded: float) -> Half:
        entry = stream * (1 + rounded * torch.randn(stream.shape, dtype=stream.dtype, generator=generator))
        steps = {"entry": entry, "o": branch, "sum": stream + scale * branch}
        return Half(steps, block_entry=stream)

    for rounded in (0.0, 2.0**-50, 2.0**-44):
        found = joins.reasons(Scene(half(1.0, 0.0), half(0.5, rounded), "attention"))
        assert [each.name for each in found] == ["branch-scale"]


def test_reasons_that_explain_a_difference_equally_well_are_listed() -> None:
    assert others("gpt", activation="relu") == (
        "On this batch the activation in B is also explained by relu6.",
    )
    assert others("gpt", activation="silu") == ()
    words = "On this batch the mask in A is also explained by a window of at least 12 tokens."
    assert others("gpt", window=4) == (words,)


@pytest.mark.parametrize(("heads", "is_tied"), [(8, True), (4, False)])
def test_two_rotary_frequencies_do_not_tell_a_base_from_a_scaling(heads: int, is_tied: bool) -> None:
    options = {"heads": heads, "kv_heads": 2}
    result = searched(opened("llama", options), opened("llama", {**options, "base": 500.0}))
    assert names(result) == ["rotary-base"]
    (group,) = grouped(result.found)
    words = "On this batch the base in B is also explained by a factor on the slower of its two frequencies."
    assert group[0].reason.others == ((words,) if is_tied else ())


def test_patches_that_read_patched_tensors_have_right_gradients() -> None:
    result = searched(plain("llama"), opened("llama", {"rotary": "interleaved", "window": 4}))
    assert names(result) == ["rotary-layout", "window"]
    assert worst_gradient(result) < 1e-9


def test_masked_logits_count_by_what_they_hide() -> None:
    a = torch.tensor([1.0, -torch.inf, 2.0])
    assert distance(a, torch.tensor([1.0, -65504.0, 2.0])) == 0
    assert distance(a, torch.tensor([1.0, 0.0, 2.0])) == 1
