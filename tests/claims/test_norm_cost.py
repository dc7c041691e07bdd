"""B13, C20, C22: operations by formula, and that times are there."""

import pytest
import torch
from torch.nn import functional as F

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim, norm_cost, residual_cost
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.fused_norm import build_add_norms
from normscope.claims.timing import in_turns, ratio, repeated


def _tested(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None
    return found


def test_operations_are_those_of_the_formula() -> None:
    d = 256
    layer, rms = (norm_cost.operations(kind, d, 0) for kind in ("layernorm", "rmsnorm"))
    assert layer["agrees"]
    assert rms["agrees"]
    assert layer["forward"] == 7 * d + 2  # and ε and the root
    assert rms["forward"] == 4 * d + 2
    assert (layer["backward"], rms["backward"]) == (11 * d, 8 * d)


def test_rms_norm_saves_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_cost, "ROUNDS", 1)
    found = _tested("B13")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["range"].verdict is Verdict.REFUTED
    assert found.evidence.figure is not None
    assert abs(found.evidence.figure.value - 100 / 3) < 0.2
    assert {case.part for case in found.evidence.cases} == {"", "range", "time", "model"}


def test_an_add_is_a_small_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_cost, "WIDTHS", (64, 512))
    monkeypatch.setattr(residual_cost, "ROUNDS", 1)
    found = _tested("C22")
    assert found.parts["operations"].verdict is Verdict.HOLDS
    assert found.parts["parameters"].verdict is Verdict.REFUTED
    adds = {case.where: case.value for case in found.evidence.cases if case.part == "operations"}
    assert 6 < adds["d = 64"] / adds["d = 512"] < 8  # like 1/d, but for attention's T


def test_fused_kernels_compute_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = build_add_norms()
    if kernels is None:
        pytest.skip("no C compiler")
    x, f, total, y = torch.randn(4, 8, 48).unbind()
    gain, bias = torch.randn(2, 48).unbind()
    for name, kernel in kernels.items():
        kernel(x, f, total, y, gain, bias)
        assert torch.allclose(y, F.layer_norm(x + f, (48,), gain, bias), atol=1e-5), name
        assert torch.allclose(total, x + f) or name == "fused_without_sum"
    monkeypatch.setattr(residual_cost, "SIZES", ((64, 64),))
    monkeypatch.setattr(residual_cost, "WIDTHS", (64,))
    monkeypatch.setattr(residual_cost, "FUSED_ROUNDS", 1)
    assert len(_tested("C20").evidence.cases) == 4


def test_ratios_are_of_the_same_round() -> None:
    taken = in_turns({"one": repeated(lambda: sum(range(1000)), 1), "four": repeated(sum_range, 4)}, 5)
    assert len(taken["one"]) == 5
    assert 2 < ratio(taken, "four", "one") < 8


def sum_range() -> int:
    return sum(range(1000))


def test_the_kernel_leaves_denormals_alone() -> None:
    """A library linked with -ffast-math has its whole process flush them, and other tests with it."""
    if build_add_norms() is None:
        pytest.skip("no C compiler")
    assert 1e-310 / 2 > 0
    assert float(torch.tensor(1e-40) * 0.5) > 0
