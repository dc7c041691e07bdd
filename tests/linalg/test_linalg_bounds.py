"""Tests of figures of a spectrum and bounds of products against dense matrices."""

import doctest
from math import exp, inf, isnan, log

import numpy as np
import pytest
import torch
from drawn_maps import drawn
from jacobian_cases import DiagonalMap

from normscope.linalg import (
    bounds,
    condition_number,
    confidence_of_each,
    effective_rank,
    joint_confidence,
    product_log_lower_bound,
    product_log_upper_bound,
    sigma_max,
    stable_rank,
    weyl_interval,
    weyl_lower_bound,
)


def test_weyl_bounds_the_smallest_singular_value() -> None:
    for scale in (0.1, 0.4, 2.0):
        branch = scale * torch.randn(20, 20, dtype=torch.float64) / 20**0.5
        norm_of_branch = float(torch.linalg.svdvals(branch)[0])
        for alpha in (1.0, -1.0, 3.0):
            smallest = float(torch.linalg.svdvals(alpha * torch.eye(20) + branch)[-1])
            assert weyl_lower_bound(norm_of_branch, alpha) <= smallest
    assert weyl_lower_bound(0.25) == 0.75


def test_weyl_holds_for_every_singular_value() -> None:
    for seed in range(10):
        a, b = drawn(7, 5, seed=seed), 0.5 * drawn(7, 5, seed=seed + 100)
        lower, upper = weyl_interval(
            torch.linalg.svdvals(a).flip(0).numpy(), float(torch.linalg.matrix_norm(b, 2))
        )
        found = torch.linalg.svdvals(a + b).numpy()
        assert (lower <= found).all()
        assert (found <= upper).all()
    values = np.array([3.0, 2.0, 1.0])
    lower, upper = weyl_interval(values, 2.5)  # reached by ±2.5·I on diag(σ)
    assert (lower.tolist(), upper.tolist()) == ([0.5, 0, 0], [5.5, 4.5, 3.5])
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="not negative"):
            weyl_interval(values, wrong)


def semicircle(n: int = 1024) -> torch.Tensor:
    """Eigenvalues in (−1/2, 1/2) of a random symmetric branch: none is isolated, so iterations end early."""
    share = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    edge = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    below = 0.5 + (edge * (1 - edge**2).sqrt() + edge.asin()) / torch.pi
    return edge[torch.searchsorted(below, share)] / 2


def test_bounds_of_iterative_estimates_need_their_errors() -> None:
    """Symmetric blocks reach both bounds: Π of the estimates is under the true σ_max of the stack."""
    depth, together = 24, 0.95
    each = confidence_of_each(together, 2 * depth)
    branch = semicircle()
    true_log, true_smallest = depth * log(1 + float(branch[-1])), 1 + float(branch[0])
    options = {"tol": 5e-2, "max_products": 24, "confidence": each}
    seen = 4 * [sigma_max(DiagonalMap(1 + branch), seed=seed, **options) for seed in range(depth // 4)]
    estimates, errors = [one.value for one in seen], [one.error for one in seen]
    assert product_log_upper_bound(estimates) < true_log - 0.01  # no bound
    assert true_log <= product_log_upper_bound(estimates, errors=errors) < true_log + depth * log(1.3)
    assert product_log_upper_bound([one.upper() for one in seen]) == pytest.approx(
        product_log_upper_bound(estimates, errors=errors)
    )
    norms = 4 * [sigma_max(DiagonalMap(branch), seed=seed, **options) for seed in range(depth // 4)]
    assert all(weyl_lower_bound(norm.value) > true_smallest for norm in norms)  # no bound
    assert all(weyl_lower_bound(norm.value, error=norm.error) <= true_smallest for norm in norms)
    assert joint_confidence([one.confidence for one in [*seen, *norms]]) == pytest.approx(together)
    loose = sigma_max(DiagonalMap(branch), max_products=24, confidence=0.8)
    sure = sigma_max(DiagonalMap(branch), max_products=24, confidence=each)
    assert loose.upper(each) == pytest.approx(sure.upper())
    assert loose.value < loose.upper() < loose.upper(0.95) < loose.upper(each)


def test_errors_widen_each_bound_in_its_direction() -> None:
    assert product_log_upper_bound([2.0, 0.5], errors=[1.0, 0.0]) == pytest.approx(log(2))
    assert product_log_lower_bound([2.0, 0.5], errors=[0.5, 0.0]) == pytest.approx(log(0.5))
    assert product_log_upper_bound([2.0, 0.0], errors=[inf, inf]) == -inf
    assert product_log_upper_bound([2.0], errors=[inf]) == inf
    assert product_log_lower_bound([2.0, 3.0], errors=[0.0, inf]) == -inf
    assert weyl_lower_bound(0.5, -2.0, error=0.5) == 1.25
    assert weyl_lower_bound(0.5, error=inf) == -inf
    assert weyl_lower_bound(0.0, error=inf) == 1
    with pytest.raises(ValueError, match="1 errors for 2"):
        product_log_upper_bound([1.0, 2.0], errors=[0.1])
    with pytest.raises(ValueError, match="not negative"):
        weyl_lower_bound(0.5, error=-0.1)


def test_confidences_add_up_their_complements() -> None:
    assert joint_confidence([0.9, 0.95]) == pytest.approx(0.85)
    assert joint_confidence([0.4, 0.4]) == 0
    assert joint_confidence([]) == joint_confidence([1.0, 1.0]) == 1
    for count in (1, 7, 96):
        assert joint_confidence([confidence_of_each(0.9, count)] * count) == pytest.approx(0.9)
    for wrong in ((1.0, 2), (0.9, 0)):
        with pytest.raises(ValueError, match="at least one estimate"):
            confidence_of_each(*wrong)
    with pytest.raises(ValueError, match="between 0 and 1"):
        joint_confidence([1.2])


def test_products_are_between_the_bounds_and_reach_them_where_vectors_align() -> None:
    for seed in range(20):
        factors = [drawn(9 + i, 8 + i, seed=10 * seed + i) for i in range(3)]  # tall: no kernels
        product = torch.linalg.svdvals(factors[2] @ factors[1] @ factors[0])
        singular = [torch.linalg.svdvals(factor) for factor in factors]
        assert log(float(product[0])) < product_log_upper_bound([float(s[0]) for s in singular])
        assert log(float(product[-1])) > product_log_lower_bound([float(s[-1]) for s in singular])
    diagonal = torch.diag(torch.tensor([5.0, 0.5], dtype=torch.float64))
    values = torch.linalg.svdvals(diagonal @ diagonal)
    assert product_log_upper_bound([5.0, 5.0]) == pytest.approx(log(float(values[0])))
    assert product_log_lower_bound([0.5, 0.5]) == pytest.approx(log(float(values[1])))


def test_bounds_of_deep_products_do_not_overflow() -> None:
    assert product_log_upper_bound([1e3] * 1000) == pytest.approx(1000 * log(1e3))
    assert product_log_lower_bound([1e-3] * 1000) == pytest.approx(-1000 * log(1e3))
    assert product_log_lower_bound([1.0, 0.0]) == -inf
    with pytest.raises(ValueError, match="at least one"):
        product_log_upper_bound([])
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="not negative"):
            product_log_lower_bound([1.0, wrong])


def test_figures_of_known_spectra() -> None:
    assert condition_number(np.array([1.0, 8.0, 2.0])) == 8
    assert condition_number(np.array([8.0, 2.0, 0.0])) == inf
    assert condition_number(np.array([8.0, 2.0, 0.0]), rank=2) == 4
    assert isnan(condition_number(np.zeros(3)))
    assert effective_rank(np.array([1.0, 1.0, 1.0, 0.0])) == pytest.approx(3)
    p = np.array([0.5, 0.3, 0.2])
    assert effective_rank(7 * p) == pytest.approx(exp(-(p * np.log(p)).sum()))
    assert stable_rank(np.array([1.0, 2.0])) == pytest.approx(5 / 4)
    assert effective_rank(np.zeros(2)) == stable_rank(np.zeros(2)) == 0


@pytest.mark.parametrize("figure", [condition_number, effective_rank, stable_rank])
def test_figures_do_not_depend_on_scale_and_order(figure) -> None:
    values = np.exp(drawn(50).numpy())
    for scale in (1e-200, 1e200):
        assert figure(scale * values[::-1]) == pytest.approx(figure(values), rel=1e-12)
    matrix = drawn(12, 12)
    assert stable_rank(torch.linalg.svdvals(matrix).numpy()) == pytest.approx(
        float(matrix.norm() ** 2 / torch.linalg.matrix_norm(matrix, 2) ** 2)
    )
    for wrong in (np.array([]), np.array([1.0, -1.0]), np.array([np.nan])):
        with pytest.raises(ValueError, match="singular values"):
            figure(wrong)


def test_a_rank_that_is_not_there_is_reported() -> None:
    with pytest.raises(ValueError, match="rank=4 of 3"):
        condition_number(np.ones(3), rank=4)


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(bounds, extraglobs={"np": np, "log": log})
    assert found.attempted >= 5
    assert not found.failed
