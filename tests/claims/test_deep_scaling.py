"""DeepNorm, and the factor on the branches."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, deep_scaling, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401


def test_deep_norm_is_a_post_ln(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_scaling, "SHORT_RUN", (2, 2))
    tested = measure_claim(CLAIMS["C16"], Setup(seeds=(0,)))
    assert tested.judgement.verdict is Verdict.REFUTED
    assert tested.judgement.counterexample is not None
    assert "read as post" in tested.judgement.counterexample.where
    assert (tested.parts["bound"].verdict, tested.parts["deepnorm"].verdict) == (
        Verdict.REFUTED,
        Verdict.HOLDS,
    )


def test_the_factor_holds_the_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_scaling, "FAR", 24)
    monkeypatch.setattr(deep_scaling, "TRAINED", 2)
    monkeypatch.setattr(deep_scaling, "SHORT_STEPS", 3)
    tested = measure_claim(CLAIMS["C28"], Setup(seeds=(0,)))
    assert tested.error is None
    assert tested.parts["variance"].verdict is Verdict.HOLDS
    assert tested.parts["gradient"].verdict is Verdict.HOLDS
