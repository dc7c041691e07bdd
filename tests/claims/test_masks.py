"""The mask and the branches' inputs: B14, B11."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, masks, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.catalogue import SCHEMES


def test_no_scheme_leaks_and_batch_norm_does_in_train_mode() -> None:
    found = measure_claim(CLAIMS["B14"], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.judgement.cases == 2 * len(SCHEMES)
    assert found.parts["norms"].verdict is Verdict.REFUTED
    assert 2 * found.parts["norms"].held == found.parts["norms"].cases


def test_branches_start_at_mean_0_and_variance_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "STEPS", 5)
    found = measure_claim(CLAIMS["B11"], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    at_start = [
        case
        for case in found.evidence.cases
        if "at the start" in case.where and not (case.part or case.fresh)
    ]
    assert len(at_start) == 12
    assert max(case.value for case in at_start) < 0.01
    assert found.parts["stream"].verdict is Verdict.REFUTED
