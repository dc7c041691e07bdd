"""Tests of the stated errors against their definitions: a dense reference for each part."""

from math import inf, sqrt

import mpmath
import numpy as np
import pytest
import torch
from drawn_maps import drawn
from jacobian_cases import DiagonalMap
from scipy.stats import norm, t

from normscope.linalg import Matrix, Status, log_density, lyapunov_exponents, sigma_max, sigma_min, smallest
from normscope.linalg.golub_kahan import Bidiagonalisation, least_component
from normscope.linalg.products.spectrum import _error as error_of_products

EPS = torch.finfo(torch.float64).eps


def most_mass(process: Bidiagonalisation, point: float) -> float:
    """1/Σ p̂_j(λ)², the p̂_j as a solution of (B̂ᵀB̂ − λ)p = 0 in all rows but the last, p₀ = 1."""
    matrix = process.bidiagonal()
    shifted = matrix.T @ matrix - point * np.eye(matrix.shape[1])
    rest = np.linalg.solve(shifted[:-1, 1:], -shifted[:-1, 0])
    return 1 / (1 + float(rest @ rest))


def most_mass_exactly(process: Bidiagonalisation, sigma: float) -> float:
    """`most_mass` at σ² in 50 digits, row by row."""
    with mpmath.workdps(50):
        matrix = mpmath.matrix(process.bidiagonal().tolist())
        squares = matrix.T * matrix
        p = [mpmath.mpf(0), mpmath.mpf(1)]
        for j in range(matrix.rows):
            before = squares[j, j - 1] * p[-2] if j else 0
            p.append(-(before + (squares[j, j] - mpmath.mpf(sigma) ** 2) * p[-1]) / squares[j, j + 1])
        return float(1 / mpmath.fsum(p, squared=True))


def started(values: torch.Tensor, start: torch.Tensor, steps: int) -> Bidiagonalisation:
    process = Bidiagonalisation(DiagonalMap(values), start=start)
    for _ in range(steps):
        process.step()
    return process


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.999])
def test_the_bound_of_a_fair_start_is_where_its_least_mass_no_longer_fits(confidence: float) -> None:
    values, start = torch.linspace(0.5, 1, 60, dtype=torch.float64), drawn(60, seed=1)
    process = started(values, start, 10)
    least = norm.ppf(0.5 + (1 - confidence) / 2) ** 2 / 60
    assert least_component(confidence) ** 2 / 60 == pytest.approx(least)
    top, bottom = process.largest, float(process.ritz_values()[-1])
    assert most_mass(process, top**2) > least  # the start is no worse than assumed
    upper = top * (1 + process.error(confidence))
    assert most_mass(process, upper**2) == pytest.approx(least, rel=1e-6)
    below = process.error_below(confidence)
    assert 0 < below < 1
    assert most_mass(process, (bottom * (1 - below)) ** 2) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("confidence", [0.5, 0.9])
def test_a_start_that_is_worse_than_assumed_is_trusted_for_a_share_of_what_it_has(confidence: float) -> None:
    values, start = torch.linspace(0.1, 1, 60, dtype=torch.float64), torch.ones(60, dtype=torch.float64)
    values[-1], start[-1] = 3.0, 1e-4  # the spike is found, through a component that is far too small
    process = started(values, start, 8)
    at_top = most_mass(process, process.largest**2)
    assert at_top < least_component(confidence) ** 2 / 60
    upper = process.largest * (1 + process.error(confidence))
    assert most_mass(process, upper**2) == pytest.approx(at_top * (1 - confidence) ** 2, rel=1e-6)


def test_the_gain_of_a_kernel_enters_eight_times() -> None:
    values = torch.tensor([5.0, 4.0, 3.0, 2.0, 1e-4], dtype=torch.float64)
    found = sigma_min(DiagonalMap(values), kernel=torch.eye(5, dtype=torch.float64)[:, 4:])
    assert found.status is Status.EXACT
    assert found.kernel_gain > 0
    assert found.error == pytest.approx(8 * found.kernel_gain / found.value, rel=1e-6)


def test_squares_cost_half_of_the_digits_of_a_small_value() -> None:
    values = torch.cat((torch.tensor([1e-6]), torch.linspace(1, 1.1, 79))).double()
    found = sigma_min(DiagonalMap(values), tol=0.3)
    assert found.status is Status.CONVERGED
    kappa = found.largest / found.value
    assert found.error >= 8 * EPS * kappa**2 > 1e-3
    longer = sigma_min(DiagonalMap(values), tol=1e-9, max_products=34, confidence=0.5)
    assert longer.status is Status.NOT_CONVERGED
    assert longer.error == pytest.approx(8 * EPS * kappa**2, rel=0.1)  # the bound itself is 1e-7 away


@pytest.mark.parametrize("steps", [32, 34])
def test_a_bound_from_squares_in_float64_is_within_its_error_of_the_exact_one(steps: int) -> None:
    values = torch.cat((torch.tensor([1e-7]), torch.linspace(0.5, 1, 59))).double()
    process = Bidiagonalisation(DiagonalMap(values), seed=0)
    for _ in range(steps):
        process.step()
    value, least = float(process.ritz_values()[-1]), least_component(0.5) ** 2 / 60
    stated = smallest._error(process, 0.5, 0.0)
    assert 0 < stated < 1
    assert most_mass_exactly(process, value) > least > most_mass_exactly(process, value * (1 - stated))


def test_the_error_of_a_product_is_twenty_times_the_largest_change_nearby() -> None:
    first = torch.zeros(1, 1, 9, dtype=torch.float64)
    others = torch.zeros(2, 1, 9, dtype=torch.float64)
    others[0, 0, 4], others[1, 0, 4] = 1e-3, -2e-3
    error = error_of_products(torch.cat((first, others)), 1, 0.0)[0]
    expected = [0.0, 0.0, 0.04, 0.04, 0.04, 0.04, 0.04, 0.0, 0.0]
    torch.testing.assert_close(error, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    floor = float(error[0])
    assert floor == pytest.approx(4 * EPS * 3, rel=1e-9, abs=0)  # L d = 9, log σ = 0
    error = error_of_products(torch.full((3, 1, 9), -50.0, dtype=torch.float64), 4, 0.0)
    assert float(error[0, 0]) == pytest.approx(4 * EPS * (6 + 50), rel=1e-9, abs=0)


def test_a_cosine_that_jacobi_left_is_in_the_error_of_a_product() -> None:
    values = torch.zeros(2, 1, 4, dtype=torch.float64)
    error = error_of_products(values, 1, 1e-3)
    torch.testing.assert_close(error, torch.full((1, 4), 4e-3, dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_error_of_lyapunov_exponents_is_students_of_ten_means() -> None:
    factors = drawn(60, 1, 1, seed=3)
    found = lyapunov_exponents(factors, confidence=0.9)
    means = factors.reshape(10, 6).abs().log().mean(1).numpy()
    expected = t.ppf(0.95, 9) * means.std(ddof=1) / sqrt(10)
    assert float(found.error) == pytest.approx(expected)
    assert float(found.values) == pytest.approx(means.mean())
    assert float(lyapunov_exponents(factors[:19]).error) == inf  # fewer than two layers a run


def test_the_bias_of_a_curved_figure_is_in_its_error_and_that_of_a_mean_is_nothing() -> None:
    values = torch.exp(torch.linspace(0, 2, 80, dtype=torch.float64))
    found = log_density(DiagonalMap(values), steps=12, num_probes=3, confidence=1e-9)
    assert found.mean.sampling < 1e-9
    assert found.std.sampling > 1e-6
    assert found.effective_rank.sampling > 1e-4


def test_what_a_larger_sigma_max_would_change_is_in_the_error_of_the_stable_rank() -> None:
    values = torch.linspace(0.5, 1, 400, dtype=torch.float64)
    found = log_density(DiagonalMap(values), steps=4, num_probes=3, confidence=0.9)
    first = sigma_max(DiagonalMap(values), max_products=8, tol=1e-9, seed=0, confidence=0.9)
    assert first.products == 8
    assert found.stable_rank.truncation >= found.stable_rank.value * (1 - (1 + first.error) ** -2) * 0.99


def test_the_round_off_of_a_map_is_in_every_error() -> None:
    class Rough(Matrix):
        round_off = 1e-3

    op = Rough(torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)))
    assert sigma_max(op, tol=0.1).error >= 8e-3
    assert sigma_min(op, tol=0.2).error >= 8e-3 * 3
    assert log_density(op, steps=4).mean.error >= 8e-3
