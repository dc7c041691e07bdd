"""Tests on the kept figures of `measure_trained.py`; `pytest -m slow` measures them anew."""

import json

import measure_trained
import pytest
import torch
from measure_trained import LADDER, MEASURES, Found

MARGIN = 0.1
"""Nats that a run must end below the byte frequencies to count as one that trains."""


@pytest.fixture(params=["kept", pytest.param("anew", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> Found:
    """The figures of the claim that the test is named by."""
    id = request.function.__name__.split("_")[1].upper()
    if request.param == "anew":
        torch.manual_seed(0)
        return MEASURES[id]()
    return json.loads(measure_trained.KEPT.read_text(encoding="utf-8"))[id]


def trains(found: Found, name: str) -> list[bool]:
    """Whether each seed's run trains."""
    return [float(end) <= -MARGIN for end in found[name]]


def test_b4_is_refuted_and_deep_post_ln_fails(found: Found) -> None:
    assert all(trains(found, "post, 4 blocks, no warm-up"))
    assert all(trains(found, "post, 4 blocks, N(0, 0.02²), no warm-up"))
    assert not any(trains(found, "post, 12 blocks, no warm-up"))
    assert all(trains(found, "pre, 12 blocks, no warm-up"))


def test_b5_is_refuted(found: Found) -> None:
    assert all(trains(found, "post, 12 blocks, N(0, 0.02²)"))


def test_c10_needs_the_norm_before_the_branch(found: Found) -> None:
    rungs = {p: sum(all(trains(found, f"{p}, {lr:g}")) for lr in LADDER) for p in ("pre", "post", "none")}
    assert rungs["pre"] > rungs["none"] > rungs["post"]


def test_c11_both_save_a_third_of_the_steps_and_norms_alone_do_not(found: Found) -> None:
    pre, none, plain = (sum(map(float, found[name])) for name in ("pre", "none", "plain"))
    assert pre <= 0.7 * plain
    assert pre > 0.7 * none


def test_c18_a_final_norm_saves_nothing(found: Found) -> None:
    assert max(b - a for a, b in zip(found["with"], found["without"], strict=True)) < 0.05


def test_c26_depends_on_the_optimiser(found: Found) -> None:
    assert not any(trains(found, "adamw, post, 8 blocks, clipped"))
    assert not any(trains(found, "sgd, no norms, 6 blocks"))
    assert all(trains(found, "sgd, no norms, 6 blocks, clipped"))


def test_c27_moving_norms_costs_half_of_what_was_learnt(found: Found) -> None:
    pairs = zip(found["trained"], found["moved"], strict=True)
    assert all(after - before >= -before / 2 for before, after in pairs)


def test_c31_norms_are_hurt_less_than_the_feed_forward_hidden_layer(found: Found) -> None:
    for norm in ("norm inputs", "norm outputs"):
        assert max(map(float, found[norm])) < min(map(float, found["hidden"]))
    assert all(a > b for a, b in zip(found["sums"], found["hidden"], strict=True)), "the sums are hurt most"


def test_c32_layer_norm_is_no_better_in_a_small_vit(found: Found) -> None:
    assert max(a - b for a, b in zip(found["layernorm"], found["batchnorm"], strict=True)) < 1.0
