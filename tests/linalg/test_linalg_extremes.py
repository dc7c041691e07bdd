"""Tests of the k largest and the smallest singular values against dense float64: values, vectors, status."""

from math import inf

import numpy as np
import pytest
import torch
from drawn_maps import drawn, orthogonal, rotated, spectra
from hypothesis import given, settings
from hypothesis import strategies as st
from jacobian_cases import CASES, Case
from torch import Tensor

from normscope.linalg import (
    JacobianOperator,
    Matrix,
    Side,
    SigmaMin,
    Status,
    TokenProjector,
    TopSingular,
    extremes,
    sigma_max,
    sigma_min,
    top_singular,
)

N = 80


def assert_honest(found: TopSingular, values: Tensor, tol: float) -> None:
    """Assert that every value is within its stated error, and that the vectors belong to the values."""
    k = len(found.values)
    true = values.sort(descending=True).values[:k].numpy()
    if found.status is Status.CONVERGED:
        assert found.error <= tol
    if found.status is not Status.NOT_CONVERGED:
        allowed = np.where(found.values > 0, found.errors * found.values, found.round_off)
        assert (np.abs(true - found.values) <= allowed).all()
        assert found.round_off <= 1e-11 * true[0]
    assert (found.values <= true * (1 + 1e-12)).all()


@pytest.mark.parametrize("k", [3, 12])
@pytest.mark.parametrize("tol", [1e-1, 1e-6])
@pytest.mark.parametrize("values", spectra(N).values(), ids=spectra(N))
def test_the_largest_are_within_their_errors_counted_with_multiplicity(
    values: Tensor, tol: float, k: int
) -> None:
    op = rotated(values)
    found = top_singular(op, k, tol=tol, max_products=1000)
    assert found.status is not Status.NOT_CONVERGED
    assert_honest(found, values, tol)
    assert found.products == op.products
    r = found.left.shape[1]
    scale = float(values.max())
    for vectors in (found.left, found.right):
        gram = vectors.T @ vectors
        torch.testing.assert_close(gram, torch.eye(r, dtype=torch.float64), rtol=0, atol=1e-9)
    projected = found.left.T @ op.matrix @ found.right
    expected = torch.diag(torch.from_numpy(found.values[:r]))
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-9 * scale)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 60),
    decades=st.floats(0, 9),
    zeros=st.integers(0, 20),
    repeats=st.integers(1, 4),
    k=st.integers(1, 12),
    tol=st.sampled_from([0.1, 0.01, 1e-4]),
    budget=st.integers(2, 120),
    seed=st.integers(0, 10**6),
)
def test_no_status_of_the_largest_flatters(size, decades, zeros, repeats, k, tol, budget, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = -decades * torch.rand(size, generator=generator, dtype=torch.float64)
    values = torch.cat(((10**exponents).repeat(repeats), torch.zeros(zeros, dtype=torch.float64)))
    found = top_singular(
        Matrix(torch.diag(values)), min(k, len(values)), tol=tol, max_products=budget, seed=seed
    )
    assert found.products <= budget
    assert_honest(found, values, tol)
    if found.status is Status.NOT_CONVERGED:
        assert found.error > tol


def test_what_is_there_three_times_is_counted_three_times() -> None:
    values = torch.tensor([2.0, 2.0, 2.0, *torch.linspace(0.1, 1, N)], dtype=torch.float64)
    found = top_singular(Matrix(torch.diag(values)), 4, tol=1e-3)
    assert found.starts >= 2  # one start sees each value once, but for round-off
    np.testing.assert_allclose(found.values, [2, 2, 2, 1], rtol=1e-3)


def test_with_k_one_it_is_sigma_max() -> None:
    op = rotated(spectra(N)["lognormal"])
    one, top = sigma_max(op, tol=1e-3), top_singular(op, 1, tol=1e-3)
    assert top.products == one.products
    assert top.values[0] == pytest.approx(one.value, rel=1e-12)
    assert top.error == pytest.approx(one.error, rel=1e-6)


def test_twenty_of_a_decaying_spectrum_cost_about_a_hundred_products() -> None:
    values = 1 / (1 + torch.arange(400, dtype=torch.float64))
    found = top_singular(Matrix(torch.diag(values)), 20, tol=1e-2)
    assert found.status is Status.CONVERGED
    assert found.products <= 100


def test_twenty_of_a_flat_top_over_a_bulk_are_proved_by_one_more_start() -> None:
    # Shaped as the stack of GPT-2-small: slowly decaying values, 1 % apart around the 20th, over a bulk.
    top = 310 * torch.arange(1, 61, dtype=torch.float64) ** -0.15
    values = torch.cat((top, torch.linspace(130, 1, 1500, dtype=torch.float64) ** 2 / 130))
    found = top_singular(Matrix(torch.diag(values)), 20, tol=1e-2, confidence=0.9)
    assert_honest(found, values, 1e-2)
    assert (found.status, found.starts) == (Status.CONVERGED, 2)
    assert found.products <= 155


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("starts", [1, 2])
def test_what_is_kept_is_known_and_bounds_the_whole(starts: int, seed: int) -> None:
    k, op = 3, Matrix(drawn(14, 12, seed=seed))
    search = extremes._Search(op, k, seed, 0.9, 1e-2)
    for _ in range(starts):  # given up long before it has converged: the coupling is large
        for _ in range(6):
            search.half_step()
        search.start_anew()
    part = search.done
    images, pulled = (
        part.left.T @ torch.from_numpy(part.matrix),
        part.right.T @ torch.from_numpy(part.matrix.T),
    )
    pulled = pulled + torch.stack(part.rests, 1) @ torch.from_numpy(part.weights.T)
    torch.testing.assert_close(op.matrix @ part.right.T, images)
    torch.testing.assert_close(op.matrix.T @ part.left.T, pulled)
    rest = op.matrix - part.left.T @ (part.left @ op.matrix)
    rest = rest - (rest @ part.right.T) @ part.right
    true = torch.linalg.svdvals(op.matrix)[:k].numpy()
    upper = extremes.least_upper(search._bounds, float(torch.linalg.matrix_norm(rest, 2)))
    assert (upper >= true).all()
    assert (upper <= 2 * true).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_rectangular_maps_and_precisions(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.logspace(0, -2, 40, dtype=torch.float64)
    op = rotated(values.to(dtype), shape=shape)
    found = top_singular(op, 5, tol=1e-3)
    assert found.status is Status.CONVERGED
    true = torch.linalg.svdvals(op.matrix.double())[:5].numpy()
    assert (np.abs(true / found.values - 1) <= found.errors).all()
    least = sigma_min(op, tol=0.1)
    assert least.status is not Status.NOT_CONVERGED
    assert abs(1 - 1e-2 / least.value) <= least.error <= 0.1
    assert (len(least.left), len(least.right)) == shape
    torch.testing.assert_close(op.matvec(least.right), least.value * least.left, rtol=0, atol=2e-3)


def test_float32_does_not_claim_what_it_cannot_hold() -> None:
    op = rotated(torch.rand(30))
    assert top_singular(op, 3, tol=1e-9, max_products=500).error > 1e-9
    assert sigma_min(rotated(torch.logspace(0, -6, 30)), tol=1e-3).status is Status.NOT_CONVERGED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jacobians_of_real_maps(case: Case) -> None:
    found = top_singular(JacobianOperator(case.f, case.x), 4, tol=1e-3)
    true = torch.linalg.svdvals(case.dense)
    assert found.status is not Status.NOT_CONVERGED
    np.testing.assert_allclose(found.values, true[:4].numpy(), rtol=1e-3, atol=1e-14)


@pytest.mark.parametrize("condition", [1.0, 3.0, 10.0, 35.0])
@pytest.mark.parametrize("kernels", ["none", "right", "left", "both", "projectors"])
def test_the_smallest_is_within_its_error(condition: float, kernels: str) -> None:
    rank = N - (0 if kernels == "none" else 10)
    values = torch.cat((torch.linspace(1, 1 / condition, rank), torch.zeros(N - rank))).double()
    op = rotated(values)
    u, _, vt = torch.linalg.svd(op.matrix)
    right, left = vt[rank:].T, u[:, rank:]
    given = {
        "none": {},
        "right": {"kernel": right},
        "left": {"left_kernel": left},
        "both": {"kernel": right, "left_kernel": left},
        "projectors": {"kernel": lambda v: v @ right @ right.T, "left_kernel": lambda v: v @ left @ left.T},
    }[kernels]
    before = op.products
    found = sigma_min(op, **given, max_products=600)
    assert found.products == op.products - before
    assert found.status is not Status.NOT_CONVERGED
    true = float(values[rank - 1])
    assert abs(1 - true / found.value) <= found.error <= 5e-2
    assert found.largest == pytest.approx(1, rel=0.1)
    assert found.kernel_gain < 1e-13
    expected = {"none": Side.NONE, "right": Side.RIGHT, "left": Side.LEFT}.get(kernels, Side.BOTH)
    assert found.deflated is expected
    gaps = (
        op.matvec(found.right) - found.value * found.left,
        op.rmatvec(found.left) - found.value * found.right,
    )
    assert max(float(gap.norm()) for gap in gaps) == pytest.approx(
        found.residual * found.value, rel=1e-3, abs=1e-9
    )
    if kernels != "none":
        assert float((right.T @ found.right).norm()) < 1e-12


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 80),
    decades=st.floats(0, 9),
    kernel=st.integers(0, 10),
    tol=st.sampled_from([0.2, 0.05, 1e-3]),
    budget=st.integers(3, 300),
    seed=st.integers(0, 10**6),
)
def test_no_status_of_the_smallest_flatters(size, decades, kernel, tol, budget, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = 10 ** (-decades * torch.rand(size, generator=generator, dtype=torch.float64))
    matrix = torch.diag(torch.cat((values, torch.zeros(kernel, dtype=torch.float64))))
    basis = torch.eye(size + kernel, dtype=torch.float64)[:, size:]
    found = sigma_min(Matrix(matrix), kernel=basis, tol=tol, max_products=budget, seed=seed)
    assert found.products <= budget
    if found.status is not Status.NOT_CONVERGED:
        assert abs(1 - float(values.min()) / found.value) <= found.error <= tol


def undeflated(op: Matrix, **more) -> SigmaMin:
    return sigma_min(op, tol=1e-2, max_products=400, **more)


def test_a_kernel_that_is_not_named_is_not_called_a_figure() -> None:
    rank = N - 6
    op = rotated(torch.cat((torch.linspace(0.877, 2, rank), torch.zeros(6))).double())
    without = undeflated(op)
    assert without.status is Status.NOT_CONVERGED
    assert without.value < 1e-10
    assert without.note
    basis = torch.linalg.svd(op.matrix)[2][rank:].T
    named = undeflated(op, kernel=basis)
    assert named.status is not Status.NOT_CONVERGED
    assert named.value == pytest.approx(0.877, rel=1e-2)
    start = drawn(N)
    start -= basis @ (basis.T @ start)
    assert float((op.matrix @ start).norm()) > 0.8  # deflating the start alone would look as good


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, 0.0], [3.0, 2.0, 0.0]], ids=str)
def test_a_map_that_is_exhausted_and_singular_has_no_smallest_value(values: list[float]) -> None:
    found = sigma_min(Matrix(torch.diag(torch.tensor(values, dtype=torch.float64))))
    assert (found.value, found.error, found.status) == (0.0, inf, Status.NOT_CONVERGED)
    assert found.note.startswith("singular") or not any(values)


def test_what_is_called_a_kernel_and_is_none_is_reported() -> None:
    wrong = sigma_min(rotated(torch.linspace(1, 2, N).double()), kernel=orthogonal(N)[:, :3])
    assert wrong.status is Status.NOT_CONVERGED
    assert wrong.kernel_gain > 0.5
    assert "gain" in wrong.note


def test_beyond_what_the_budget_reaches_it_says_so() -> None:
    found = sigma_min(rotated(torch.logspace(0, -9, N).double()), max_products=100)
    assert found.status is Status.NOT_CONVERGED
    assert found.error > 0.05
    assert found.value >= 1e-9
    assert "σ_max/σ_min" in found.note
    tiny = sigma_min(rotated(torch.ones(N).double()), max_products=2)
    assert tiny.products <= 2


def test_bad_arguments_are_reported() -> None:
    op = rotated(torch.ones(6).double())
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"k={k} for a map"):
            top_singular(op, k)
    for function in (lambda **more: top_singular(op, 1, **more), lambda **more: sigma_min(op, **more)):
        with pytest.raises(ValueError, match="max_products=1"):
            function(max_products=1)
        with pytest.raises(ValueError, match="confidence=1"):
            function(confidence=1)
    with pytest.raises(ValueError, match="leave nothing"):
        sigma_min(op, kernel=torch.eye(6).double())
    with pytest.raises(FloatingPointError, match="not finite"):
        sigma_min(Matrix(torch.diag(torch.tensor([1.0, inf]))))
    with pytest.raises(FloatingPointError, match="not finite"):
        top_singular(Matrix(torch.diag(torch.tensor([1.0, inf]))), 1)


def test_a_kernel_of_each_token() -> None:
    tokens = [drawn(5, 5, seed=s) for s in range(6)]
    basis = torch.stack([torch.linalg.svd(t)[2][-1:].T for t in tokens])
    blocks = [t @ (torch.eye(5).double() - b @ b.T) for t, b in zip(tokens, basis, strict=True)]
    matrix = torch.block_diag(*blocks)
    true = float(torch.linalg.svdvals(matrix)[-7])
    found = sigma_min(Matrix(matrix), kernel=TokenProjector(basis), max_products=1000)
    assert found.status is not Status.NOT_CONVERGED
    assert abs(1 - true / found.value) <= found.error
