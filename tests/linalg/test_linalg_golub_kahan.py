"""Tests of σ_max against dense float64: value, vectors and status."""

from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacobian_cases import CASES, Case, DiagonalMap
from torch import Tensor

from normscope.linalg import (
    JacobianOperator,
    Matrix,
    Shifted,
    Status,
    numerical_rank,
    sigma_max,
    singular_values,
)
from normscope.linalg.golub_kahan import Bidiagonalisation

N = 150


def spectra() -> dict[str, Tensor]:
    uniform = torch.rand(N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    spike, cluster = uniform.clone(), 0.5 + 0.01 * uniform
    spike[7], cluster[7] = 1.04, 0.6
    deficient = torch.where(torch.arange(N) < 50, uniform, 0.0)
    return {
        "uniform": uniform,
        "spike": spike,
        "cluster and spike": cluster,
        "one cluster": 1 + 1e-6 * uniform,
        "one outlier": torch.tensor([1.0] * (N - 1) + [1.1], dtype=torch.float64),
        "rank 50": deficient,
        "condition 1e9": torch.logspace(0, -9, N, dtype=torch.float64),
        "lognormal": torch.exp(2 * torch.randn(N, generator=torch.Generator().manual_seed(6)).double()),
        "tiny": 1e-30 * uniform,
        "huge": 1e30 * uniform,
    }


@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-6])
@pytest.mark.parametrize("values", spectra().values(), ids=spectra())
def test_converged_means_within_the_stated_error(values: Tensor, tol: float) -> None:
    largest = float(values.max())
    op = DiagonalMap(values, rotated=True)
    for seed in range(3):
        before = op.num_products
        found = sigma_max(op, tol=tol, max_products=400, seed=seed)
        assert found.status is not Status.NOT_CONVERGED
        assert found.error <= tol
        assert (largest - found.value) / found.value <= found.error
        assert found.value <= largest * (1 + 1e-12)
        assert found.products == op.num_products - before
        for vector in (found.left, found.right):
            assert float(vector.norm()) == pytest.approx(1, abs=1e-10)
        gaps = (
            float((op.matvec(found.right) - found.value * found.left).norm() / found.value),
            float((op.rmatvec(found.left) - found.value * found.right).norm() / found.value),
        )
        assert min(gaps) <= 1e-9  # by construction
        assert max(gaps) <= found.residual + 1e-9


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 200),
    decades=st.floats(0, 9),
    zeros=st.integers(0, 60),
    spike=st.floats(1, 1.2),
    tol=st.sampled_from([0.1, 0.03, 0.01, 1e-4]),
    budget=st.integers(2, 60),
    seed=st.integers(0, 10**6),
)
def test_no_status_ever_flatters(size, decades, zeros, spike, tol, budget, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = -decades * torch.rand(size, generator=generator, dtype=torch.float64)
    values = torch.cat((10**exponents, torch.zeros(zeros, dtype=torch.float64)))
    values[0] = spike * values.max()
    found = sigma_max(DiagonalMap(values), tol=tol, max_products=budget, seed=seed)
    error = float(values.max()) / found.value - 1
    assert found.products <= budget
    if found.status is Status.EXACT:
        assert abs(error) <= 1e-9
    elif found.status is Status.CONVERGED:
        assert error <= found.error <= tol
    else:
        assert found.error > tol


def test_the_bound_fails_as_often_as_its_confidence_says() -> None:
    values = torch.tensor([1.05] + [1 - 0.02 * i / N for i in range(N)], dtype=torch.float64)
    misses = {0.5: 0, 0.999: 0}
    for confidence in misses:
        for seed in range(200):
            found = sigma_max(DiagonalMap(values), tol=1e-2, seed=seed, confidence=confidence)
            misses[confidence] += 1.05 / found.value - 1 > found.error
    assert misses[0.999] <= 2  # 0.2 expected at most
    assert 2 <= misses[0.5] <= 110  # 100 at most: the test can see a miss


def test_a_start_that_turns_out_bad_is_not_trusted() -> None:
    # The spike lies where v₁ is small. Once a Ritz value is on its way there, the assumed mass is refuted.
    n, misses = 40, 0
    for seed in range(300):
        start = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = torch.linspace(0.2, 1, n, dtype=torch.float64)
        values[int(start.abs().argsort()[2])] = 1.25
        found = sigma_max(DiagonalMap(values), tol=1e-2, seed=seed, confidence=0.9)
        error = 1.25 / found.value - 1
        misses += error > found.error
        assert found.error > 1e-9 or error < 1e-6, (seed, found)
    assert misses < 200


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jacobians_of_real_maps(case: Case) -> None:
    found = sigma_max(JacobianOperator(case.f, case.x), tol=1e-3, max_products=60)
    u, values, v = torch.linalg.svd(case.dense)
    assert found.status is not Status.NOT_CONVERGED
    assert found.value == pytest.approx(float(values[0]), rel=1e-3, abs=1e-300)
    if values[0] > 1.1 * values[1]:
        assert abs(float(found.left @ u[:, 0])) == pytest.approx(1, abs=1e-3)
        assert abs(float(found.right @ v[0])) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("coupling", [1e-11, 1e-16])
def test_a_small_coupling_counts_unless_it_is_round_off(coupling: float) -> None:
    matrix = torch.tensor([[1.0, coupling], [0.0, 2.0]], dtype=torch.float64)
    process = Bidiagonalisation(Matrix(matrix), start=torch.tensor([1.0, 0.0]))
    while not process.exhausted:
        process.step()
    assert process.largest == pytest.approx(2 if coupling == 1e-11 else 1)  # from e₁, 2 is seen through it


def test_exhausted_spaces_are_exact() -> None:
    zero = sigma_max(DiagonalMap(torch.zeros(9, dtype=torch.float64)))
    assert (zero.value, zero.status, zero.products) == (0.0, Status.EXACT, 1)
    rank_one = torch.zeros(9, dtype=torch.float64)
    rank_one[3] = 5
    found = sigma_max(DiagonalMap(rank_one, rotated=True), tol=1e-14)
    assert found.status is Status.EXACT
    assert found.value == pytest.approx(5, rel=1e-12)
    assert sigma_max(
        DiagonalMap(torch.full((9,), 2.0, dtype=torch.float64)), tol=1e-15
    ).value == pytest.approx(2)


def test_too_few_products_are_not_converged_and_say_how_far_off_they_may_be() -> None:
    values = torch.rand(N, dtype=torch.float64)
    found = sigma_max(DiagonalMap(values), tol=1e-3, max_products=7)
    assert found.status is Status.NOT_CONVERGED
    assert found.products == 7
    assert found.error > 1e-3


def test_float32_products_whose_squares_underflow_are_not_zero() -> None:
    found = sigma_max(DiagonalMap(1e-30 * torch.rand(N)), tol=1e-2, max_products=200)
    assert found.status is Status.CONVERGED
    assert found.value == pytest.approx(1e-30, rel=0.1)


def test_float32_does_not_claim_what_it_cannot_hold() -> None:
    values = torch.rand(N)
    assert sigma_max(DiagonalMap(values), tol=1e-9, max_products=200).status is Status.NOT_CONVERGED
    found = sigma_max(DiagonalMap(values), tol=1e-3, max_products=200)
    assert found.status is Status.CONVERGED
    assert found.value == pytest.approx(float(values.max()), rel=1e-3)


def test_bad_arguments_and_values_are_reported() -> None:
    with pytest.raises(ValueError, match="max_products=1"):
        sigma_max(DiagonalMap(torch.ones(3)), max_products=1)
    with pytest.raises(ValueError, match="confidence=1"):
        sigma_max(DiagonalMap(torch.ones(3)), confidence=1)
    with pytest.raises(FloatingPointError, match="not finite"):
        sigma_max(DiagonalMap(torch.tensor([1.0, inf])))


def test_rank_carries_its_tolerance_and_its_gap() -> None:
    assert numerical_rank(np.array([1.0, 0.5, 1e-8, 1e-9]), 1e-5) == (2, pytest.approx(0.5e8))
    assert numerical_rank(np.array([1.0, 0.5]), 1e-5) == (2, inf)
    assert numerical_rank(np.array([1.0, 0.0]), 1e-5) == (1, inf)
    assert numerical_rank(np.zeros(3), 1e-5) == (0, inf)
    assert numerical_rank(np.array([]), 1e-5) == (0, inf)
    assert numerical_rank(np.array([1e-9, 1.0, 2.0]), 1e-5) == (2, pytest.approx(1e9))
    assert numerical_rank(np.array([1e6, 1.0, 0.5]), 1e-5) == (1, 1e6)  # 1 is under 1e-5 · σ₁
    for wrong in (float("nan"), inf, -1.0):
        with pytest.raises(ValueError, match="negative or not finite"):
            numerical_rank(np.array([wrong, 1.0]), 1e-5)
    values = singular_values(torch.diag(torch.tensor([1.0, 3.0, 2.0])))
    np.testing.assert_allclose(values, [3, 2, 1])


@pytest.mark.parametrize("scale", [1e-165, 1e160])
@pytest.mark.parametrize("shape", [(30, 30), (1, 20), (3, 20)])
def test_squares_neither_under_nor_overflow(shape: tuple[int, int], scale: float) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = sigma_max(Matrix(matrix * scale), tol=1e-3)
    assert found.status is not Status.NOT_CONVERGED
    assert found.value / scale == pytest.approx(float(torch.linalg.svdvals(matrix)[0]), rel=1e-3)


def test_round_off_of_parts_that_cancel_is_seen() -> None:
    """A − I for an A near I in float32: its σ_max of 3e-7 is in the noise of the products."""
    generator = torch.Generator().manual_seed(2)
    basis, _ = torch.linalg.qr(torch.randn(200, 200, dtype=torch.float64, generator=generator))
    gains = 1 + 3e-7 * torch.rand(200, dtype=torch.float64, generator=generator)
    near = (basis * gains @ basis.T).float()
    found = sigma_max(Shifted(Matrix(near), alpha=-1.0))
    true = float(torch.linalg.svdvals(near.double() - torch.eye(200, dtype=torch.float64))[0])
    assert abs(true / found.value - 1) > 1e-2  # or there is nothing to see
    assert found.status is Status.NOT_CONVERGED


def test_a_budget_between_two_products_ends() -> None:
    matrix = torch.randn(400, 400, generator=torch.Generator().manual_seed(3))
    assert sigma_max(Matrix(matrix), tol=1e-7, max_products=30.5).products <= 30  # type: ignore[arg-type]
