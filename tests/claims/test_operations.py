"""B13, C20, C22: operations by formula."""

import pytest

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim, operations
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401


def measured(id: str) -> ClaimResult:
    """The claim on one seed, without an error."""
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    return found


def test_operations_are_those_of_the_formula() -> None:
    d = 256
    layer, rms = (operations.operations(kind, d) for kind in ("layernorm", "rmsnorm"))
    assert layer["agrees"]
    assert rms["agrees"]
    assert layer["forward"] == 7 * d + 2  # and ε and the root
    assert rms["forward"] == 4 * d + 2
    assert (layer["backward"], rms["backward"]) == (11 * d, 8 * d)


def test_rms_norm_saves_about_a_third() -> None:
    found = measured("B13")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.judgement.held == 0
    assert found.parts["inside"].verdict is Verdict.HOLDS
    both = [case.value for case in found.evidence.cases if case.at.get("way") == "both"]
    assert both == pytest.approx([100 / 3] * len(both), abs=0.6)


def test_norms_and_adds_are_a_small_share_of_a_step() -> None:
    found = measured("C22")
    assert found.judgement.verdict is found.parts["adds"].verdict is Verdict.HOLDS
    assert found.parts["parameters"].verdict is Verdict.REFUTED
    adds = {case.where: case.value for case in found.evidence.cases if case.part == "adds"}
    assert 6 < adds["d = 64"] / adds["d = 512"] < 8  # like 1/d, but for attention's T


def test_a_claim_about_gpus_is_not_measured_on_a_cpu() -> None:
    assert measured("C20").judgement.verdict is Verdict.NOT_MEASURED
