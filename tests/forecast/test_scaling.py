"""The learning rate of a larger model: power laws, their range, and where nothing was measured."""

from dataclasses import replace
from typing import Any

import pytest

from normscope import load, read_anatomy
from normscope.forecast import BestRate, Forecast
from normscope.forecast.scaling import DEPTH, LAWS, MUP_WIDTH, TIMES, WIDTH, at_scale

BEST = BestRate(1e-3, 8e-4, 1.5e-3, "the lowest loss predicted for 300 steps")


def rung(**changed: Any) -> Forecast:
    return replace(Forecast("trains", "so", "adamw", 1e-3, 0, 36, 3.0), **changed)


def rates(best: BestRate = BEST, scheme: str = "pre", own: bool = False, **changed: Any):
    anatomy = read_anatomy(load(f"nn:decoder,scheme={scheme},depth=2,width=16,heads=2,vocab=32"))
    return at_scale(best, (rung(**changed),), anatomy, own)


def of(found, axis: str, parametrisation: str = "standard"):
    return {
        each.times: each
        for each in found.rates
        if (each.axis, each.parametrisation) == (axis, parametrisation)
    }


@pytest.mark.parametrize(
    ("axis", "parametrisation", "law"),
    [(axis, parametrisation, laws["pre"]) for axis, parametrisation, laws in LAWS],
)
def test_a_larger_model_has_the_rate_of_the_power_law(axis: str, parametrisation: str, law) -> None:
    found = of(rates(), axis, parametrisation)
    assert found.keys() == {times for times in TIMES if times <= law.most}
    for times, each in found.items():
        assert each.rate == pytest.approx(1e-3 * times**law.exponent)
        assert each.low == pytest.approx(each.rate / law.spread), "the spread is wider than the range"
        assert each.high == pytest.approx(each.rate * law.spread)
    wide = of(rates(replace(BEST, low=1e-5, high=1e-1)), axis, parametrisation)
    assert wide.keys() == found.keys() != set()
    for times, each in wide.items():
        assert each.low == pytest.approx(1e-5 * times**law.exponent), "the range is wider than the spread"
        assert each.high == pytest.approx(1e-1 * times**law.exponent)


def test_the_signs_are_those_that_are_known() -> None:
    assert WIDTH["pre"].exponent < 0, "a wider model in the standard parametrisation has a smaller rate"
    assert DEPTH["post"].exponent < DEPTH["pre"].exponent < 0, "Post-LN's rate falls faster with depth"
    assert abs(MUP_WIDTH["pre"].exponent) < abs(WIDTH["pre"].exponent)


def test_no_size_is_answered_that_was_not_measured() -> None:
    for scheme in ("pre", "post", "deepnorm"):
        found = rates(scheme=scheme)
        assert list(of(found, "depth")) == [times for times in TIMES if times <= DEPTH[scheme].most]
        assert list(of(found, "width")) == ([] if scheme == "deepnorm" else [2, 4])
        assert list(of(found, "width", "mup")) == ([2, 4] if scheme == "pre" else [])
    assert list(of(rates(scheme="post"), "depth")) == [2]


@pytest.mark.parametrize("scheme", ["peri", "res-post", "layerscale", "mix-ln"])
def test_a_placement_without_a_law_has_no_answer(scheme: str) -> None:
    found = rates(scheme=scheme)
    assert (found.rates, found.reason) == ((), "not measured for this placement of the norms")


def test_blocks_of_two_placements_have_no_law() -> None:
    pre, post = (
        read_anatomy(load(f"nn:decoder,scheme={scheme},depth=2,width=16,heads=2,vocab=32"))
        for scheme in ("pre", "post")
    )
    mixed = replace(pre.stacks[0], blocks=pre.blocks + post.blocks)
    found = at_scale(BEST, (rung(),), replace(pre, stacks=(mixed,)), False)
    assert "this placement" in found.reason
    assert found.rates == ()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"best": BestRate(None, None, None, "none")}, "no learning rate with a range"),
        ({"best": BestRate(1e-3, None, None, "the only one")}, "no learning rate with a range"),
        ({"best": replace(BEST, warmup=9)}, "not measured with a warm-up"),
        ({"warmup": 9}, "not measured with a warm-up"),
        ({"optimizer": "sgd"}, "not measured with sgd"),
        ({"tokens": False}, "predict the next token"),
        ({"hidden": "mask"}, "predict the next token"),
        ({"own": True}, "by its size"),
    ],
)
def test_the_reason_is_given_where_no_rate_is(changed: dict[str, Any], words: str) -> None:
    found = rates(**changed)
    assert found.rates == ()
    assert words in found.reason
    assert rates().reason == ""


def test_an_encoder_and_a_decoder_have_no_law() -> None:
    anatomy = read_anatomy(load("nn:encoder-decoder,scheme=pre,depth=2,width=16,heads=2,vocab=32"))
    found = at_scale(BEST, (rung(),), anatomy, False)
    assert (found.rates, found.reason) == ((), "not measured for this placement of the norms")
