"""Laws for all schemes; `laws.py` defines them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import (
    block_map,
    compiles_whole,
    gradients_are_right,
    never_leaks,
    padding_changes_nothing,
    rank,
    runs_in_half_precision,
    survives_its_state_dict,
)

from normscope.nn import SCHEMES, Slot, Where
from normscope.nn.placement import Kind

names = pytest.mark.parametrize("name", sorted(SCHEMES))
WIDTH = 12


@names
@given(st.integers(1, 9), st.data())
@settings(max_examples=4, deadline=None)
def test_the_causal_mask_never_leaks(name: str, num_tokens: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, num_tokens - 1))
    positions = data.draw(st.sampled_from(["learnt", "rotary"]))
    never_leaks(name, num_tokens, at, positions=positions)


@names
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_padding_does_not_change_real_tokens(name: str, kind: str, left: bool) -> None:
    padding_changes_nothing(name, kind, left, positions="rotary" if left else "learnt")


@names
def test_the_gradients_are_those_of_the_function(name: str) -> None:
    gradients_are_right(name)


@names
def test_the_state_dict_is_the_whole_model(name: str) -> None:
    survives_its_state_dict(name)


@names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    runs_in_half_precision(name, dtype)


# Tracing the backward too takes three times as long, and depends on the join and on how weights are made.
# A second block is traced where its norms are not those of the first, or more than a sum joins the two and
# the backward is traced too.
WITH_BACKWARD = [
    "plain",
    "post",
    "keel",
    "ngpt",
    "sigma-reparam",
    "siamesenorm",
    "mhc",
    "gtrxl",
    "attnres",
    "nanochat",
]


def slots(name: str, block: int) -> list[set[Slot]]:
    """The slots of each branch of a block of two, less that of the whole stack's end."""
    kinds: tuple[Kind, ...] = ("attention", "feed-forward")
    return [{*SCHEMES[name].placement_at(Where(block, 2, kind=kind)).slots} - {Slot.FINAL} for kind in kinds]


@names
def test_compiled_as_one_graph(name: str) -> None:
    with_backward = name in WITH_BACKWARD
    one_suffices = not with_backward or SCHEMES[name].join.kind in ("none", "add")
    depth = 1 if one_suffices and slots(name, 1) == slots(name, 2) else 2
    compiles_whole(name, "aot_eager" if with_backward else "eager", depth=depth)


def test_every_kind_of_join_is_compiled_with_the_backward() -> None:
    kinds = {SCHEMES[name].join.kind for name in WITH_BACKWARD}
    assert kinds == {scheme.join.kind for scheme in SCHEMES.values()}


@pytest.mark.parametrize(
    "options",
    [
        {"value_residual": "half"},
        {"value_residual": "learnt"},
        {"attention_gate": "head"},
        {"z_loss": 0.1},
        {"qk_clip": 0.1},
        {"residual_warmup": 3},
    ],
    ids=lambda options: "-".join(map(str, options.items())),
)
@pytest.mark.parametrize("name", ["pre", "siamesenorm"])
def test_options_obey_the_laws_too(name: str, options: dict[str, Any]) -> None:
    never_leaks(name, 5, 2, **options)
    padding_changes_nothing(name, "encoder", True, positions="rotary", **options)
    survives_its_state_dict(name, **options)
    runs_in_half_precision(name, torch.bfloat16, **options)
    depth = (
        2 if {"value_residual", "residual_warmup"} & options.keys() else 1
    )  # they make block 2 another one
    compiles_whole(name, "aot_eager" if name == "pre" else "eager", depth=depth, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor's own
@names
def test_compiled_by_inductor(name: str) -> None:
    compiles_whole(name, "inductor", rtol=1e-8)


def expected_rank(name: str) -> int:
    """d−2 if a LayerNorm is on the only stream, d−1 if it is a unit norm, else d."""
    scheme = SCHEMES[name]
    on_stream = any(
        Slot.STREAM in scheme.placement_at(Where(3, 4, kind=kind))  # type: ignore[arg-type]
        for kind in ("attention", "feed-forward")
    )
    if not on_stream or scheme.join.kind == "streams":
        return WIDTH
    return WIDTH - (2 if scheme.norm in (None, "layernorm") else 1)


@names
def test_a_norm_on_the_stream_costs_the_jacobian_two_directions(name: str) -> None:
    assert rank(name, WIDTH) == expected_rank(name)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("post", 2), ("deepnorm", 2), ("admin", 2), ("b2t", 2), ("keel", 2), ("hybridnorm", 2), ("ngpt", 1)]
    + [(name, 0) for name in ("pre", "peri", "res-post", "residual-dual", "siamesenorm", "mix-ln", "gpas")],
)
def test_the_ranks_that_the_papers_make_one_expect(name: str, missing: int) -> None:
    """The same figures as literals, so that a wrong placement cannot agree with itself."""
    assert rank(name, WIDTH) == WIDTH - missing


def test_the_first_quarter_of_mix_ln_is_post() -> None:
    _, first = block_map("mix-ln", WIDTH, block=1)
    jacobian = torch.autograd.functional.jacobian(first, torch.randn(WIDTH, dtype=torch.float64))
    assert torch.linalg.matrix_rank(jacobian, rtol=1e-9) == WIDTH - 2
