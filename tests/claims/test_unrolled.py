"""B1, B2 and B9 on one seed."""

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401

LOOK = Setup(seeds=(0,))


def of(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], LOOK)
    assert found.error is None
    return found


def test_pre_ln_is_a_sum() -> None:
    assert of("B1").judgement.verdict is Verdict.HOLDS


def test_the_identity_path_meets_the_final_norm_alone() -> None:
    found = of("B2")
    assert found.judgement.verdict is Verdict.HOLDS
    assert {name for name, part in found.parts.items() if part.verdict is Verdict.REFUTED} == {"head"}


def test_one_norm_a_layer_is_right() -> None:
    found = of("B9")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["second"].verdict is Verdict.HOLDS
    assert found.parts["pre"].verdict is Verdict.HOLDS
    assert found.parts["order"].verdict is Verdict.REFUTED
