"""A1 to A3: the norm by itself has the Jacobian, the kernel and the side of γ that theory says."""

import pytest
import torch

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.exact import as_exact, exact_rank, scaled_norm_jacobian
from normscope.claims.norm_jacobian import _formula_cases, _line_14

LOOK = Setup(seeds=(0,))


def of(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], LOOK)
    assert found.error is None
    return found


@pytest.fixture(scope="module")
def kernel() -> ClaimResult:
    return of("A2")


def test_the_rank_is_two_under_the_width(kernel: ClaimResult) -> None:
    assert kernel.judgement.verdict is Verdict.HOLDS
    assert {case.value for case in kernel.evidence.cases if "exact" in case.where} == {2}


def test_the_kernel_of_a_real_norm_depends_on_eps(kernel: ClaimResult) -> None:
    part = kernel.parts["eps"]
    assert part.verdict is Verdict.CONDITION
    assert 0.5 < part.met / part.cases < 1
    (measured, formula) = kernel.evidence.plots[0].lines
    assert measured.y == pytest.approx(formula.y, rel=1e-4)


def test_line_14_of_the_proof_is_wrong() -> None:
    z = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    z_hat = (z - z.mean()) / z.std(correction=0)
    printed = (torch.eye(4, dtype=torch.float64) - 0.25) / z.std(correction=0) - torch.outer(z_hat, z_hat) / 4
    assert torch.allclose(_line_14(z), printed)
    cases = [case for case in _formula_cases(0) if case.part == "printed"]
    assert all(case.holds == ("σ = 1," in case.where) for case in cases), "right for σ = 1 alone"


def test_gain_stands_on_the_left() -> None:
    found = of("A3")
    assert found.judgement.verdict is Verdict.REFUTED, "γ alike is a degenerate case"
    assert found.parts["left"].verdict is Verdict.HOLDS
    assert found.parts["kernel"].verdict is Verdict.CONDITION
    assert found.parts["gradients"].verdict is Verdict.REFUTED
    of_gradients = [case for case in found.evidence.cases if case.part == "gradients"]
    assert all(case.holds == ("γ = " in case.where) for case in of_gradients), "where γ is alike alone"
    zeros = {c.where: c.value for c in found.evidence.cases if c.part == "kernel" and "d = 64" in c.where}
    assert next(v for where, v in zeros.items() if "with one zero," in where) == 2
    assert next(v for where, v in zeros.items() if "two zeros where z is alike" in where) == 3
    assert next(v for where, v in zeros.items() if "half zeros" in where) == 32


def test_rank_by_fractions() -> None:
    assert exact_rank(scaled_norm_jacobian(as_exact([1, 2, 4, 9]))) == 2
    assert exact_rank(scaled_norm_jacobian(as_exact([1, -1]))) == 0
