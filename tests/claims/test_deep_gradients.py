"""B10, C1 and C17 on one seed."""

import pytest

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401

LOOK = Setup(seeds=(0,))


def of(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], LOOK)
    assert found.error is None
    return found


def test_one_factor_decides_nothing() -> None:
    found = of("B10")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.judgement.held == 0


def test_a_residual_layer_can_shrink_a_gradient() -> None:
    found = of("C1")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["small"].verdict is Verdict.HOLDS


def test_post_ln_decays_beside_identical_tokens_and_nowhere_else() -> None:
    found = of("C17")
    assert found.judgement.verdict is Verdict.REFUTED
    assert [case.where for case in found.evidence.cases if case.holds and not case.part] == [
        "Post-LN, Xavier, cross-attention to identical tokens: ‖∂x_0‖/‖∂x_64‖"
    ]
    assert found.evidence.figure is not None
    assert found.evidence.figure.value == pytest.approx(0.717, abs=0.04)
    assert found.parts["pre"].verdict is Verdict.HOLDS
