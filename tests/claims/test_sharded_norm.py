"""C23, on real processes."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim, sharded_norm
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401


def test_one_collective_forward_and_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_norm, "WORLDS", (2, 3))
    found = measure_claim(CLAIMS["C23"], Setup(seeds=(0,)))
    assert found.error is None
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["sums"].verdict is Verdict.REFUTED
    assert (found.parts["sums"].held, found.parts["sums"].cases) == (6, 8)
    assert found.parts["overlap"].verdict is Verdict.HOLDS
    assert found.parts["backward"].verdict is Verdict.REFUTED


def test_ranks_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_norm, "PROGRAM", "normscope.no_such_program")
    found = measure_claim(CLAIMS["C23"], Setup(seeds=(0,)))
    assert found.error is not None
    assert "no_such_program" in found.error
