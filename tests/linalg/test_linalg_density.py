"""Tests of densities of log σ against the dense SVD: coverage of errors, large values, kernels, W₁."""

from math import inf, nan

import numpy as np
import pytest
import torch
from drawn_maps import drawn, rotated, spectra
from jacobian_cases import CASES, Case, DiagonalMap
from torch import Tensor

from normscope.linalg import (
    Estimate,
    LogDensity,
    Matrix,
    Status,
    TokenProjector,
    layer_norm_jacobian,
    left_kernel,
    log_density,
)
from normscope.linalg.density import still_to_come

N = 90
FIGURES = ["mean", "std", "kernel", "effective_rank", "stable_rank"]


def exact(values: np.ndarray, floor: float = 0.0) -> dict[str, float]:
    """The figures from all singular values; those up to `floor` are the kernel."""
    s = values[values > floor]
    p = s / s.sum()
    return {
        "mean": np.log(s).mean(),
        "std": np.log(s).std(),
        "kernel": 1 - len(s) / len(values),
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "stable_rank": (s**2).sum() / s.max() ** 2,
    }


def within(found: LogDensity, name: str, expected: float) -> bool:
    figure: Estimate = getattr(found, name)
    return abs(figure.value - expected) <= figure.error + 1e-9 * abs(expected)


def distance(found: LogDensity, values: np.ndarray, floor: float = 0.0) -> float:
    """W₁ in nats to all singular values above the floor."""
    logs, kernel = np.sort(np.log(values[values > floor])), found.measure.kernel
    shares = (np.arange(len(logs)) + 0.5) / len(logs)
    return float(
        np.mean(
            [abs(found.quantile(kernel + (1 - kernel) * s) - x) for s, x in zip(shares, logs, strict=True)]
        )
    )


def smooth() -> dict[str, Tensor]:
    index = torch.arange(1, 301, dtype=torch.float64)
    kernel = torch.exp(2 * torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    kernel[: N // 6] = 0
    return {
        "ten": torch.exp(torch.linspace(0, np.log(10), N, dtype=torch.float64)),
        "three clusters": torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).repeat(N // 3),
        "kernel": kernel,
        "one spike": torch.cat((torch.tensor([30.0]), 1 + 0.5 * index[:-1] / 300)).double(),
        "power law": 1 / index,
        "heavy lognormal": torch.exp(1.5 * drawn(300, seed=3)),
    }


@pytest.mark.parametrize("values", smooth().values(), ids=smooth())
def test_error_bars_cover_the_truth_as_often_as_they_say_and_ranks_are_at_least_one(values: Tensor) -> None:
    op, runs, truth = DiagonalMap(values), 20, exact(values.numpy())
    hits = dict.fromkeys([*FIGURES, "distance"], 0)
    for run in range(runs):
        found = log_density(op, steps=20, seed=5 * run)
        for name, expected in truth.items():
            hits[name] += within(found, name, expected)
        hits["distance"] += distance(found, values.numpy()) <= found.distance.error
        for rank in (found.stable_rank, found.effective_rank):
            assert 1 <= rank.value <= found.size
    assert min(hits.values()) >= 0.95 * runs - 3 * (runs * 0.05 * 0.95) ** 0.5, hits


@pytest.mark.parametrize("seed", [0, 1])
def test_a_rank_that_chance_puts_under_one_is_one(seed: int) -> None:
    values = 0.7 ** torch.arange(40, dtype=torch.float64)
    found = log_density(DiagonalMap(values), steps=4, num_probes=2, seed=seed)  # none of the largest is known
    assert found.stable_rank.value == 1
    assert within(found, "stable_rank", exact(values.numpy())["stable_rank"])


def test_the_largest_values_count_once_and_not_by_chance() -> None:
    """Probes alone have an error of 40 % on a power law; with deflation the rank has an error of 3 %."""
    values = smooth()["power law"]
    expected = exact(values.numpy())["stable_rank"]
    for seed in range(0, 50, 5):
        found = log_density(DiagonalMap(values), steps=20, seed=seed)
        assert found.stable_rank.value == pytest.approx(expected, rel=0.03)
        assert found.stable_rank.error < 0.1 * expected


def test_a_confidence_of_one_half_misses_half() -> None:
    values = smooth()["ten"]
    found = [log_density(DiagonalMap(values), steps=16, seed=5 * i, confidence=0.5) for i in range(30)]
    hits = sum(within(each, "mean", float(values.log().mean())) for each in found)
    assert 7 <= hits <= 23


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", spectra(N))
def test_no_status_flatters_on_spectra_that_make_trouble(name: str, dtype: torch.dtype) -> None:
    values = spectra(N)[name].to(dtype)
    op = rotated(values)
    sigma = torch.linalg.svdvals(op.matrix.double()).numpy()
    floor = N * torch.finfo(dtype).eps * sigma.max()
    misses = 0
    for seed in range(2):
        found = log_density(op, steps=24, seed=10 * seed, confidence=0.999)
        if name == "zero":
            assert (found.kernel.value, found.kernel.error) == (1, 0)
            assert np.isnan(found.mean.value)
            assert found.stable_rank.value == found.effective_rank.value == 0
            continue
        if found.status is Status.CONVERGED:
            assert found.distance.truncation <= 0.1 * found.std.value + 1e-3
        missed = {f: getattr(found, f) for f, x in exact(sigma, floor).items() if not within(found, f, x)}
        misses += len(missed) + (distance(found, sigma, floor) > found.distance.error + 1e-9)
    assert misses <= 1


def wide() -> dict[str, Tensor]:
    """Log σ over 2 to 10 nats: quantiles of distributions, and products of random matrices."""
    share = (torch.arange(600, dtype=torch.float64) + 0.5) / 600
    one = drawn(300, 300)
    return {
        "geometric 3": 3 * share,
        "geometric 10": 10 * share,
        "lognormal 1": torch.special.ndtri(share),
        "two random matrices": torch.linalg.svdvals(one @ drawn(300, 300, seed=1)).log(),
        "a layer": torch.linalg.svdvals(torch.eye(300) + one / 300**0.5).log(),
        "two bands": share + 5 * (share > 0.125),
    }


@pytest.mark.parametrize("logs", wide().values(), ids=wide())
def test_wide_spectra_come_within_ten_per_cent_or_say_that_they_do_not(logs: Tensor) -> None:
    found = log_density(DiagonalMap(logs.exp()), num_probes=6)
    assert found.products == 2 * 7 * 32
    far = distance(found, logs.exp().numpy())
    assert far <= found.distance.error
    if found.status is Status.CONVERGED:
        assert far <= 0.1 * float(logs.std()) + found.distance.sampling


def test_a_spectrum_that_no_forty_steps_can_see_is_not_converged() -> None:
    found = log_density(DiagonalMap(spectra(300)["condition 1e9"]))
    assert found.status is Status.NOT_CONVERGED
    assert found.mean.error > abs(found.mean.value - np.log(1e-9) / 2)
    assert found.kernel.value == pytest.approx(0, abs=1e-12)
    assert found.kernel.truncation > 0.5  # so much might be zero


def test_a_kernel_is_told_apart_and_left_out_of_the_density() -> None:
    values = smooth()["kernel"]
    found = log_density(DiagonalMap(values), num_probes=8, steps=30)
    assert found.kernel.value == pytest.approx(1 / 6, abs=found.kernel.error)
    assert 0 < found.kernel.error < 0.1  # the kernel is detected
    assert found.quantile(0.5 * found.kernel.value) == -inf
    assert found.quantile(1.0) == pytest.approx(float(values.max().log()), abs=0.02)
    assert found.quantile(0.5) == pytest.approx(float(values.log().sort().values[N // 2]), abs=0.2)


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
    dense, kernel = post_ln(12, 10)
    right = torch.linalg.svd(dense).Vh[-kernel.dimension :].T
    named = {"left": {"left_kernel": kernel}, "both": {"left_kernel": kernel, "kernel": right}}
    op = Matrix((dense.T if sides == "right" else dense).to(dtype))
    truth, misses = outside(dense, kernel), 0
    for seed in (0, 5):
        found = log_density(op, steps=20, seed=seed, confidence=0.999, **named.get(sides, {"kernel": kernel}))
        assert found.size == len(truth)
        assert found.kernel.value == pytest.approx(0, abs=1e-12)
        assert found.kernel.error < 1e-3
        assert found.status is Status.CONVERGED
        assert found.kernel_gain < 1e3 * torch.finfo(dtype).eps
        assert found.products == 2 * 5 * 20 + (2 if sides == "both" else 1)
        misses += sum(not within(found, name, x) for name, x in exact(truth).items() if name != "kernel")
        misses += distance(found, truth) > found.distance.error
    assert misses == 0


def test_a_kernel_that_is_none_shows_in_the_errors() -> None:
    dense, kernel = post_ln(8, 12)
    wrong = torch.eye(len(dense))[:, :9]
    found = log_density(Matrix(dense), kernel=wrong, left_kernel=kernel, steps=60)
    assert found.kernel_gain > 0.1
    assert found.status is Status.NOT_CONVERGED
    truth = exact(outside(dense, kernel))
    for name in ("mean", "std", "effective_rank", "stable_rank"):
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
    truth = exact(sigma, 1e-13 * sigma.max())
    for name in FIGURES:
        assert within(found, name, truth[name]), (name, getattr(found, name), truth[name])
    assert found.status is Status.CONVERGED  # 24 inputs: 32 steps see it all
    m, n = jacobian.shape
    assert found.products <= 7 * 2 * (min(m, n) + 1)


def test_an_identity_has_no_spread_and_no_error() -> None:
    found = log_density(Matrix(3 * torch.eye(30, dtype=torch.float64)))
    assert found.mean.value == pytest.approx(np.log(3))
    assert found.mean.error < 1e-12
    assert found.std.value < 1e-12
    assert found.effective_rank.value == pytest.approx(30)
    assert found.stable_rank.value == pytest.approx(30)
    assert found.products == 10
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


def test_what_is_still_to_come_is_the_rest_of_a_geometric_series() -> None:
    assert 4 <= still_to_come(np.array([8.0, 4.0])) <= 8  # 2 + 1 + … = 4, with some safety
    assert still_to_come(np.array([8.0, 0.0])) == 0
    assert still_to_come(np.array([8.0, 1e-3])) == pytest.approx(1e-3 / 3)  # r is 1/4 at least
    assert still_to_come(np.array([1.0, 1.0])) == inf
    assert still_to_come(np.array([1e-12, 1e-12])) == 1e-12
