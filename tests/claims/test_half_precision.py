"""LayerNorm in half precision: C24, C25, C34, C35."""

import pytest
import torch

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.half_precision import METHODS
from normscope.claims.result import ClaimResult as Found


def measured(id: str) -> Found:
    """The claim on one seed, without an error."""
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    return found


@pytest.mark.parametrize("name", METHODS)
def test_algorithms_are_right_in_float64(name: str) -> None:
    x = torch.randn(3, 50, dtype=torch.float64)
    mean, variance = METHODS[name](x)
    torch.testing.assert_close(mean[:, 0], x.mean(1))
    torch.testing.assert_close(variance[:, 0], x.var(1, correction=0))


def test_float32_statistics_are_needed_where_sums_stall() -> None:
    found = measured("C24")
    assert found.judgement.verdict is Verdict.CONDITION
    assert found.parts["robust"].verdict is Verdict.HOLDS
    assert found.parts["welford"].verdict is Verdict.REFUTED


def test_a_lower_eps_makes_it_worse() -> None:
    found = measured("C25")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.evidence.figure is not None
    assert found.evidence.figure.value == pytest.approx(10**0.5, rel=0.01)  # 1/√ε
    assert found.parts["guard"].verdict is Verdict.CONDITION
    assert found.parts["usual"].verdict is Verdict.HOLDS


def test_two_formulas_differ_at_small_scales() -> None:
    found = measured("C34")
    assert found.judgement.verdict is Verdict.CONDITION
    assert found.parts["gradient"].verdict is Verdict.REFUTED


def test_the_shape_of_a_distribution_stays() -> None:
    found = measured("C35")
    assert found.judgement.verdict is Verdict.REFUTED
    assert [case.where for case in found.evidence.cases if case.holds and not case.part] == ["normal"]
    assert found.parts["moments"].verdict is Verdict.CONDITION
