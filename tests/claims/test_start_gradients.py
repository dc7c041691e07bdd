"""Gradients at the start: where Post-LN's tilt, what Pre-LN's depend on."""

import pytest

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.start_gradients import of_xiong, post_gradients


@pytest.fixture(scope="module")
def pre_ln() -> ClaimResult:
    return measure_claim(CLAIMS["B16"], Setup(seeds=(0,)))


def test_a_layer_from_below_does_not_see_the_depth(pre_ln: ClaimResult) -> None:
    assert pre_ln.judgement.verdict is Verdict.CONDITION
    assert pre_ln.parts["even"].verdict is Verdict.CONDITION


def test_the_last_layer_falls_as_the_root_of_the_depth(pre_ln: ClaimResult) -> None:
    assert pre_ln.evidence.figure is not None
    assert pre_ln.evidence.figure.value == pytest.approx(-0.5, abs=0.1)


def test_post_ln_tilts_beside_cross_attention_alone() -> None:
    alone, crossed = post_gradients("decoder", 12, 0), post_gradients("encoder-decoder", 12, 0)
    assert len(alone) == len(crossed) == 12
    assert alone[-1] < 4 * alone[0]
    assert crossed[-1] > 20 * crossed[0]


def test_a_large_head_makes_the_gradient_larger() -> None:
    assert of_xiong("pre", 1, 0, 64, unit_head=True) > 3 * of_xiong("pre", 1, 0, 64)
