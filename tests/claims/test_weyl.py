"""A10 and A12: the floor under I + A, and Table 1, on one seed."""

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401

LOOK = Setup(seeds=(0,))


def of(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], LOOK)
    assert found.error is None
    return found


def test_weyl_holds_and_its_printed_route_does_not() -> None:
    found = of("A10")
    assert found.judgement.verdict is Verdict.HOLDS
    attained = [case for case in found.evidence.cases if case.where.startswith("d = 3, A = -0.5 · I")]
    assert all(abs(case.value) < 1e-12 for case in attained)
    assert found.parts["pairs"].verdict is Verdict.HOLDS
    printed = found.parts["printed"]
    assert printed.verdict is Verdict.REFUTED
    assert 0 < printed.held < printed.cases


def test_table_1_holds_within_its_hypothesis_and_not_for_an_f_that_cancels_the_identity() -> None:
    found = of("A12")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.judgement.outside > 0
    assert found.parts["unconditional"].verdict is Verdict.REFUTED
    wrong = {case.where for case in found.evidence.cases if not case.holds}
    assert wrong
    assert all("F(u) = −σ(x) u" in where for where in wrong)
