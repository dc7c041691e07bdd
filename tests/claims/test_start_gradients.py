"""Gradients at the start: where Post-LN's tilt, what Pre-LN's depend on."""

import pytest

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.start_gradients import MEMORIES, of_xiong, post_gradients


@pytest.fixture(scope="module")
def pre_ln() -> ClaimResult:
    """B16 on one seed."""
    return measure_claim(CLAIMS["B16"], Setup(seeds=(0,)))


def test_a_layer_from_below_does_not_see_the_depth(pre_ln: ClaimResult) -> None:
    assert pre_ln.judgement.verdict is pre_ln.parts["even"].verdict is Verdict.REFUTED
    assert pre_ln.parts["from the input"].verdict is Verdict.HOLDS
    assert pre_ln.parts["vanish"].verdict is Verdict.CONDITION


def test_the_last_layer_falls_as_the_root_of_the_depth(pre_ln: ClaimResult) -> None:
    assert pre_ln.evidence.figure is not None
    assert pre_ln.evidence.figure.value == pytest.approx(-0.5, abs=0.1)


def test_post_ln_tilts_beside_a_collapsed_memory_alone() -> None:
    found = {memory: post_gradients(memory, 12, 0, 32) for memory in MEMORIES}
    tilts = {memory: gradients[-1] / gradients[0] for memory, (gradients, _) in found.items()}
    assert all(len(gradients) == 12 for gradients, _ in found.values())
    assert max(tilts["none"], tilts["drawn tokens"]) < 4
    assert tilts["identical tokens"] > 20
    assert found["identical tokens"][1] < 1e-6 < 0.5 < found["drawn tokens"][1]


def test_a_large_head_makes_the_gradient_larger() -> None:
    assert of_xiong("pre", 1, 0, 64, unit_head=True) > 3 * of_xiong("pre", 1, 0, 64)
