"""Densities of log σ against the dense SVD: error bars that cover, kernels apart, W₁ to a few per cent."""

import doctest
from math import inf, nan

import numpy as np
import pytest
import torch
from drawn_maps import drawn, rotated, spectra
from jacobian_cases import CASES, Case
from torch import Tensor

from normscope.linalg import (
    Estimate,
    JacobianOperator,
    LogDensity,
    Status,
    TokenProjector,
    density,
    layer_norm_jacobian,
    left_kernel,
    log_density,
)
from normscope.linalg.estimates import still_to_come
from normscope.linalg.golub_kahan import Bidiagonalisation
from normscope.linalg.maps import BaseMap, Matrix
from normscope.linalg.quadrature import CLUSTER, Rule, pooled, share_below, spread, transport

N = 90
FIGURES = ["mean", "std", "kernel", "log_volume", "effective_rank", "participation", "stable_rank"]


def exact(values: np.ndarray, resolution: float) -> dict[str, float]:
    """The figures from all singular values; those up to `resolution` are the kernel."""
    s = values[values > resolution]
    p = s / s.sum()
    return {
        "mean": np.log(s).mean(),
        "std": np.log(s).std(),
        "kernel": 1 - len(s) / len(values),
        "log_volume": np.log(s).sum(),
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "participation": (s**2).sum() ** 2 / (s**4).sum(),
        "stable_rank": (s**2).sum() / s.max() ** 2,
    }


def as_rule(values: np.ndarray, resolution: float) -> Rule:
    nodes = np.sort(np.log(values[values > resolution]))
    return Rule(nodes, np.full(len(nodes), 1 / len(values)), 0.0, np.ones(len(nodes), dtype=bool))


def within(found: LogDensity, name: str, expected: float) -> bool:
    figure: Estimate = getattr(found, name)
    return abs(figure.value - expected) <= figure.error + 1e-9 * abs(expected)


def smooth() -> dict[str, Tensor]:
    kernel = torch.exp(2 * torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    kernel[: N // 6] = 0
    return {
        "ten": torch.exp(torch.linspace(0, np.log(10), N, dtype=torch.float64)),
        "three clusters": torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).repeat(N // 3),
        "kernel": kernel,
        "residual": torch.linalg.svdvals(torch.eye(N) + 0.5 * drawn(N, N) / N**0.5),
    }


@pytest.mark.parametrize("values", smooth().values(), ids=smooth())
def test_error_bars_cover_the_truth_as_often_as_they_say(values: Tensor) -> None:
    op, runs = rotated(values), 60
    hits = dict.fromkeys([*FIGURES, "distance"], 0)
    for run in range(runs):
        found = log_density(op, steps=24, seed=4 * run)
        for name, expected in exact(values.numpy(), found.resolution).items():
            hits[name] += within(found, name, expected)
        truth = as_rule(values.numpy(), found.resolution)
        hits["distance"] += transport(found.distribution, truth) <= found.distance.error
    assert min(hits.values()) >= 0.95 * runs - 3 * (runs * 0.05 * 0.95) ** 0.5, hits
    assert hits["mean"] + hits["std"] + hits["kernel"] >= 0.95 * 3 * runs - 8, hits


def test_a_confidence_of_one_half_misses_half() -> None:
    values = smooth()["ten"]
    op = rotated(values)
    found = [log_density(op, steps=24, seed=4 * run, confidence=0.5) for run in range(60)]
    hits = sum(within(each, "mean", float(values.log().mean())) for each in found)
    assert 18 <= hits <= 42


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", spectra(N))
def test_no_status_flatters_on_spectra_that_make_trouble(name: str, dtype: torch.dtype) -> None:
    values = spectra(N)[name].to(dtype)
    sigma = torch.linalg.svdvals(rotated(values).matrix.double()).numpy()
    misses = 0
    for seed in range(5):
        found = log_density(rotated(values), steps=24, seed=10 * seed, confidence=0.999)
        if name == "zero":
            assert (found.kernel.value, found.kernel.error) == (1, 0)
            assert np.isnan(found.mean.value)
            continue
        floor = max(found.resolution, N * torch.finfo(dtype).eps * sigma.max())
        truth = exact(sigma, floor)
        if found.status is Status.CONVERGED:
            assert found.distance.truncation <= 0.05 * found.std.value + 1e-3
        misses += sum(not within(found, figure, truth[figure]) for figure in FIGURES)
        misses += transport(found.distribution, as_rule(sigma, floor)) > found.distance.error + 1e-9
    assert misses <= 1


class Diagonal(BaseMap):
    """diag(σ): to random probes what a rotated one is, at cost O(n)."""

    def __init__(self, values: Tensor) -> None:
        super().__init__((len(values), len(values)), values.dtype, values.device)
        self.values = values

    def _forward(self, rows: Tensor) -> Tensor:
        return rows * self.values

    _backward = _forward


def stack(depth: int, size: float, n: int = 300) -> Tensor:
    """log σ of a product of I + A, the entries of A of this size."""
    whole = torch.eye(n, dtype=torch.float64)
    for i in range(depth):
        whole = whole + size * drawn(n, n, seed=i) @ whole / n**0.5
    return torch.linalg.svdvals(whole).log()


def wide() -> dict[str, tuple[Tensor, bool]]:
    """Quantiles of log σ over 2 to 10 nats, and whether 4 probes of 40 steps come within 5 % of them."""
    share = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    normal = torch.special.ndtri(share)
    deep, shallow, one = stack(12, 0.5), stack(12, 0.3), drawn(600, 600)
    return {
        "geometric 3": (3 * share, True),
        "geometric 4": (4 * share, True),
        "geometric 5": (5 * share, True),
        "geometric 7": (7 * share, False),
        "geometric 10": (10 * share, False),
        "lognormal 0.5": (0.5 * normal, True),
        "lognormal 1": (normal, False),
        "lognormal 1.5": (1.5 * normal, False),
        "one random matrix": (torch.linalg.svdvals(one).log(), True),
        "two random matrices": (torch.linalg.svdvals(one @ drawn(600, 600, seed=1)).log(), False),
        "12 layers": (shallow, True),
        "12 layers of more gain": (deep, True),
        "cluster and tail": (3 * (share - 0.9).clamp(min=0) / 0.1, True),
        "two bands": (share + 5 * (share > 0.125), True),
    }


@pytest.mark.parametrize(("logs", "is_near"), wide().values(), ids=wide())
def test_wide_spectra_come_within_five_per_cent_or_say_that_they_do_not(logs: Tensor, is_near: bool) -> None:
    logs = torch.tensor(np.interp(np.arange(8000) / 7999, np.linspace(0, 1, len(logs)), logs.sort().values))
    found = log_density(Diagonal(logs.exp()))
    assert found.products == 2 * 4 * 40
    std = float(logs.std())
    if is_near:
        assert transport(found.distribution, as_rule(logs.exp().numpy(), 0)) <= 0.05 * std
    else:
        assert found.status is Status.NOT_CONVERGED


@pytest.mark.parametrize(("logs", "_"), wide().values(), ids=wide())
@pytest.mark.parametrize("steps", [24, 40])
def test_truncation_covers_the_way_to_the_probes_own_measure(logs: Tensor, _: bool, steps: int) -> None:
    logs = torch.tensor(np.interp(np.arange(2000) / 1999, np.linspace(0, 1, len(logs)), logs.sort().values))
    op = Diagonal(logs.exp())
    found = log_density(op, steps=steps, num_probes=8)
    starts = torch.stack([Bidiagonalisation(op, seed=seed).right[0] for seed in range(8)])
    seen = Rule(logs.numpy(), starts.square().mean(0).numpy(), 0.0, np.ones(len(logs), dtype=bool))
    assert transport(found.distribution, seen) <= found.distance.truncation


def test_a_spectrum_that_no_forty_steps_can_see_is_not_converged() -> None:
    found = log_density(rotated(spectra(300)["condition 1e9"]))
    assert found.status is Status.NOT_CONVERGED
    assert found.mean.error > abs(found.mean.value - np.log(1e-9) / 2)
    assert found.kernel.value == 0
    assert found.kernel.truncation > 0.5  # that much might be zero, for all that was seen


def test_a_kernel_is_told_apart_and_left_out_of_the_density() -> None:
    values = smooth()["kernel"]
    found = log_density(rotated(values), num_probes=8, steps=30)
    assert found.kernel.value == pytest.approx(1 / 6, abs=found.kernel.error)
    assert 0 < found.resolution < float(values[values > 0].min())
    points = np.linspace(-3, 5, 801)
    curve, error = found.density(points)
    assert np.trapezoid(curve, points) == pytest.approx(1 - found.kernel.value, abs=1e-6)
    assert (error >= 0).all()
    below, _ = found.cdf(np.array([-10.0]))
    assert below[0] == pytest.approx(found.kernel.value)
    assert found.quantile(0.5 * found.kernel.value) == -inf
    assert found.quantile(1.0) == pytest.approx(float(values.max().log()), abs=0.02)
    median = float(values.log().sort().values[N // 2])
    assert found.quantile(0.5) == pytest.approx(median, abs=0.15)


@pytest.mark.parametrize("values", smooth().values(), ids=smooth())
def test_cdf_and_density_on_a_grid_lie_within_their_errors(values: Tensor) -> None:
    op, logs = rotated(values), np.log(values.numpy().clip(1e-300))
    points, h = np.linspace(-1.5, 3, 40), 0.3
    share = (logs[:, None] <= points).mean(0)
    z = (points[:, None] - logs) / h
    smoothed = np.exp(-0.5 * z * z).mean(1) / (h * (2 * np.pi) ** 0.5)
    hits = []
    for run in range(12):
        found = log_density(op, steps=24, seed=4 * run)
        for (value, error), expected in (
            (found.cdf(points), share),
            (found.density(points, bandwidth=h), smoothed),
        ):
            hits.append(np.abs(value - expected) <= error + 1e-6)
            assert float(error.max()) < 1
    assert np.mean(hits) >= 0.92


def post_ln(tokens: int, d: int, size: float = 0.4, seed: int = 1000) -> tuple[Tensor, TokenProjector]:
    """P(I + A): a Post-LN block's Jacobian with gains of its norm, and its left kernel, 2 for each token."""
    n = tokens * d
    z, gamma = drawn(tokens, d, seed=seed), 1 + 0.2 * drawn(d, seed=seed + 1)
    z = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True, correction=0)
    norm = torch.block_diag(*layer_norm_jacobian(z, gamma, 0.0))
    kernel = TokenProjector(left_kernel(z, gamma, True)[0])
    return norm @ (torch.eye(n) + size * drawn(n, n, seed=seed + 2) / n**0.5), kernel


def outside(jacobian: Tensor, kernel: TokenProjector) -> np.ndarray:
    """Singular values outside a kernel, by the dense SVD."""
    return torch.linalg.svdvals(jacobian).numpy()[: len(jacobian) - kernel.dimension]


@pytest.mark.parametrize("sides", ["left", "right", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_named_kernels_are_left_out_and_the_steps_go_to_the_rest(dtype: torch.dtype, sides: str) -> None:
    dense, kernel = post_ln(16, 12)
    right = torch.linalg.svd(dense).Vh[-kernel.dimension :].T
    named = {"left": {"left_kernel": kernel}, "both": {"left_kernel": kernel, "kernel": right}}
    op = Matrix((dense.T if sides == "right" else dense).to(dtype))
    truth, misses = outside(dense, kernel), 0
    for seed in range(5):
        found = log_density(
            op, steps=20, seed=4 * seed, confidence=0.999, **named.get(sides, {"kernel": kernel})
        )
        assert found.size == len(truth)
        assert found.kernel.value == 0
        assert found.kernel.error < 1e-3
        assert found.status is Status.CONVERGED
        assert found.kernel_gain < 1e3 * torch.finfo(dtype).eps
        assert found.products == 2 * 4 * 20 + (2 if sides == "both" else 1)
        misses += sum(not within(found, name, figure) for name, figure in exact(truth, 0).items())
        misses += transport(found.distribution, as_rule(truth, 0)) > found.distance.error
    assert misses == 0


def test_a_kernel_that_does_not_come_to_rest_is_seen_through_when_it_is_named() -> None:
    dense, kernel = post_ln(8, 64, 1.0)
    op, truth = Matrix(dense.float()), outside(dense, kernel)
    assert log_density(op).status is Status.NOT_CONVERGED
    found = log_density(op, left_kernel=kernel)
    assert found.status is Status.CONVERGED
    assert all(within(found, name, figure) for name, figure in exact(truth, 0).items())
    assert transport(found.distribution, as_rule(truth, 0)) <= found.distance.error


def test_what_is_left_over_beside_a_named_kernel_is_a_share_of_the_rest() -> None:
    dense, kernel = post_ln(16, 12)
    n = len(dense)
    dense = dense @ torch.diag((torch.arange(n) >= 50).double())  # 50 columns more that are zero
    found = log_density(Matrix(dense), left_kernel=kernel, num_probes=8, confidence=0.999)
    truth = outside(dense, kernel)
    expected = exact(truth, 1e-12)
    assert expected["kernel"] == pytest.approx(18 / (n - kernel.dimension))  # 50 inputs less the 32 lost
    for name in FIGURES:
        assert within(found, name, expected[name]), (name, getattr(found, name), expected[name])


def test_a_kernel_that_is_none_shows_in_the_errors() -> None:
    dense, kernel = post_ln(8, 12)
    wrong = torch.eye(len(dense))[:, :9]
    found = log_density(Matrix(dense), kernel=wrong, left_kernel=kernel, steps=60)
    assert found.kernel_gain > 0.1
    assert found.status is Status.NOT_CONVERGED
    truth = exact(outside(dense, kernel), 0)
    for name in ("mean", "std", "log_volume", "effective_rank", "participation", "stable_rank"):
        assert within(found, name, truth[name]), name
    with pytest.raises(ValueError, match="leave nothing"):
        log_density(Matrix(dense), kernel=torch.eye(len(dense)))
    with pytest.raises(ValueError, match="expected orthonormal"):
        log_density(Matrix(dense), kernel=torch.ones(len(dense), 2))


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "zero"], ids=lambda c: c.name)
def test_jacobians_of_any_shape(case: Case) -> None:
    jacobian = case.dense
    sigma = torch.linalg.svdvals(jacobian).numpy()
    found = log_density(Matrix(jacobian), num_probes=6, confidence=0.999)
    truth = exact(sigma, max(found.resolution, 1e-13 * sigma.max()))
    for name in FIGURES:
        assert within(found, name, truth[name]), (name, getattr(found, name), truth[name])
    assert found.status is Status.CONVERGED  # 24 inputs: 40 steps see it all
    m, n = jacobian.shape
    assert found.products <= 6 * 2 * (min(m, n) + 1)


def test_float32_counts_what_it_cannot_resolve_as_kernel() -> None:
    values = torch.cat((torch.linspace(1, 2, 40), torch.full((20,), 1e-9)))
    found = log_density(rotated(values.float()), steps=60, num_probes=6)
    assert found.kernel.value == pytest.approx(1 / 3, abs=found.kernel.error)
    assert found.mean.value == pytest.approx(float(values[:40].log().mean()), abs=found.mean.error)


def test_an_identity_has_no_spread_and_no_error() -> None:
    found = log_density(Matrix(3 * torch.eye(30, dtype=torch.float64)))
    assert found.mean.value == pytest.approx(np.log(3))
    assert found.mean.error < 1e-12
    assert found.std.value < 1e-12
    for name in ("effective_rank", "participation", "stable_rank"):
        assert getattr(found, name).value == pytest.approx(30)
    assert found.products == 8
    assert found.status is Status.CONVERGED


def test_refusals() -> None:
    op = Matrix(torch.eye(3))
    for wrong in ({"num_probes": 1}, {"steps": 3}):
        with pytest.raises(ValueError, match="at least 2 probes of 4 steps"):
            log_density(op, **wrong)
    with pytest.raises(ValueError, match="between 0 and 1"):
        log_density(op, confidence=95)
    with pytest.raises(FloatingPointError):
        log_density(Matrix(torch.full((5, 5), nan)))


def test_spreading_keeps_the_mass_and_leaves_sharp_nodes() -> None:
    rule = Rule(np.array([0.0, 1.0, 3.0]), np.array([0.2, 0.5, 0.2]), 0.1, np.array([True, False, False]))
    fine = spread(rule)
    assert fine.weights.sum() == pytest.approx(0.9)
    assert share_below(fine, np.array([-0.1, 0.0, 1.0, 2.999, 3.0])) == pytest.approx(
        [0, 0.2, 0.2 + 0.25, 0.9 - 0.1, 0.9]
    )
    both = pooled([rule, rule])
    assert (both.kernel, both.weights.sum()) == (pytest.approx(0.1), pytest.approx(0.9))
    assert transport(rule, both) == pytest.approx(0, abs=1e-15)
    moved = Rule(rule.nodes + 0.5, rule.weights, 0.1, rule.sharp)
    assert transport(rule, moved) == pytest.approx(0.5)


def test_half_of_the_lowest_node_goes_down_from_the_density_above_it() -> None:
    weights = np.array([0.4, 0.2, 0.4])
    rule = Rule(np.array([0.0, 1.0, 2.0]), weights, 0.0, np.zeros(3, dtype=bool))
    fine = spread(rule)
    assert fine.weights.sum() == pytest.approx(1)
    assert share_below(fine, np.array([0.0]))[0] == pytest.approx(0.2)
    length = 0.2 / 0.3  # half of the node, over the density above it
    assert -3 * length < fine.nodes[0] < -length
    below = fine.nodes < 0
    assert fine.weights[below] @ fine.nodes[below] / 0.2 == pytest.approx(-0.75 * length, rel=0.05)
    assert spread(rule, below=False).nodes[0] == 0
    sharp = Rule(rule.nodes, weights, 0.0, np.array([True, False, False]))
    assert spread(sharp).nodes[0] == 0


def test_a_node_far_heavier_than_its_neighbours_keeps_what_it_has_beyond() -> None:
    rule = Rule(np.arange(3.0), np.array([0.05, 0.9, 0.05]), 0.0, np.zeros(3, dtype=bool))
    fine = spread(rule)
    assert fine.weights[fine.nodes == 1].sum() == pytest.approx(0.9 - CLUSTER * 0.05)


def test_what_is_still_to_come_is_the_rest_of_a_geometric_series() -> None:
    assert still_to_come(np.array([8.0, 4.0])) >= 4  # 2 + 1 + …
    assert still_to_come(np.array([8.0, 4.0])) <= 8
    assert still_to_come(np.array([1.0, 1.0])) == inf
    assert still_to_come(np.array([1e-12, 1e-12])) == 1e-12


def test_examples_run() -> None:
    names = {"torch": torch, "JacobianOperator": JacobianOperator}
    assert doctest.testmod(density, extraglobs=names).failed == 0
