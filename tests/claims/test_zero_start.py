"""Stacks that start as the identity."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim, zero_start
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.zero_start import increments, is_bare_sum


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_start, "STEPS", 4)


def test_increments() -> None:
    assert increments([3.0, 2.0, 1.0]) == 0
    assert increments([1.0, 2.0, 1.0]) == 2


def test_zero_last_maps() -> None:
    tested = measure_claim(CLAIMS["C14"], Setup(seeds=(0,)))
    assert tested.error is None
    assert tested.judgement.verdict is Verdict.HOLDS
    assert tested.parts["any"].verdict is Verdict.REFUTED
    moved = {case.where: case.value for case in tested.evidence.cases if case.part == "any"}
    assert moved["pre, zero last maps"] == moved["rezero, by itself"] == moved["swin-v2, by itself"] == 0
    assert moved["post, zero last maps"] > 0.5


def test_bare_sums() -> None:
    assert is_bare_sum("pre")
    assert is_bare_sum("fixup")
    assert not is_bare_sum("post")
    assert not is_bare_sum("mix-ln")
    assert not is_bare_sum("dslm")


def test_zero_gains() -> None:
    tested = measure_claim(CLAIMS["C19"], Setup(seeds=(0,)))
    assert tested.error is None
    assert tested.judgement.verdict is Verdict.CONDITION
    assert tested.parts["learns"].verdict is Verdict.CONDITION
    alive = {case.where: case.value for case in tested.evidence.cases if case.part == "learns"}
    assert alive["before the branch (pre), relu, share of γ with a gradient"] == 0.5
    assert alive["on the stream (post), gelu, share of γ with a gradient"] == 0
