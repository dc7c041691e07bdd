"""BatchNorm beside LayerNorm: C4, C5, C6, C36."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.result import ClaimResult as Found


def measured(id: str) -> Found:
    """The claim on one seed, without an error."""
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    return found


def test_error_falls_as_the_root_of_the_batch() -> None:
    found = measured("C4")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.evidence.figure is not None
    assert found.evidence.figure.value == pytest.approx(-0.5, abs=0.05)
    assert found.parts["vectors"].verdict is Verdict.HOLDS


def test_padding_is_nothing_to_a_norm_that_is_reported() -> None:
    found = measured("C5")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["told"].verdict is Verdict.REFUTED
    assert found.parts["told"].held == 0
    assert found.parts["ln"].verdict is Verdict.HOLDS


def test_both_modes() -> None:
    assert measured("C6").judgement.verdict is Verdict.HOLDS


def test_view_is_not_a_transpose() -> None:
    found = measured("C36")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.judgement.held == 0
    assert "up to 10 features" in found.evidence.notes[0]
