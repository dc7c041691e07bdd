"""A4 to A9 and A17 to A21: one layer, and what gradients lose in it."""

import pytest

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.lost_gradients import crossings

LOOK = Setup(seeds=(0,))


def of(id: str, seed: int) -> ClaimResult:
    found = measure_claim(CLAIMS[id], Setup(seeds=(seed,)))
    assert found.error is None
    return found


@pytest.mark.parametrize("id", ["A4", "A6", "A8"])
def test_formulas_and_equivalence_hold_to_round_off(id: str) -> None:
    found = of(id, 0)
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.evidence.figure is not None
    assert found.evidence.figure.value < 1e-12


def test_rank_of_a_post_ln_layer() -> None:
    found = of("A5", 0)
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["token"].verdict is Verdict.HOLDS
    equality = found.parts["equality"]
    assert equality.verdict is Verdict.CONDITION
    assert equality.counterexample is not None
    assert not equality.counterexample.met
    assert found.evidence.figure is not None
    assert found.evidence.figure.value == 2
    lost = {case.where: case.value for case in found.evidence.cases if not case.part}
    assert lost["F = −x + a constant, d = 16"] == 16
    assert lost["F = −(x·u)u, I + J_F singular, d = 16"] == 2  # u is lost, but span{1, ẑ} meets u^⊥ in a line


def test_singular_values_are_gains_of_changes_not_of_gradients() -> None:
    found = of("A9", 1)
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["gradient"].verdict is Verdict.REFUTED
    assert found.parts["left"].verdict is Verdict.HOLDS


def test_norm_one_is_too_much() -> None:
    found = of("A17", 0)
    assert found.judgement.verdict is Verdict.CONDITION
    real = [
        case.where
        for case in found.evidence.cases
        if "Pre-LN" in case.where and "= 1," in case.where and not case.fresh
    ]
    assert len(real) == 4
    assert all(where.endswith("rank 2") for where in real)  # I − (I − Q) = Q, of 1 and ẑ


def test_what_is_lost_of_a_gradient_is_the_left_kernel() -> None:
    found = of("A18", 0)
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["left"].verdict is Verdict.HOLDS
    assert found.parts["arriving"].verdict is Verdict.HOLDS


def test_a_branch_that_mixes_tokens() -> None:
    found = of("A20", 0)
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["feed-forward"].verdict is Verdict.HOLDS


def test_a_constant_token_loses_one_dimension_only() -> None:
    found = of("A21", 0)
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["eps"].verdict is Verdict.CONDITION
    assert found.evidence.figure is not None
    assert found.evidence.figure.value == 1


def test_the_last_norm_takes_two_directions_and_those_below_little() -> None:
    *below, last = crossings("post", "xavier", 6, 32, 0, LOOK)
    assert 0.3 < last.share / (2 / 32) < 4
    assert max(crossing.share for crossing in below) < last.share
    assert all(crossing.leak < 1e-2 for crossing in (*below, last))
    (final,) = crossings("pre", "xavier", 2, 32, 0, LOOK)
    assert 0.3 < final.share / (2 / 32) < 4
