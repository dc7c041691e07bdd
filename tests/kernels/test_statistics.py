"""Mean and variance by three algorithms, against exact fractions and the published error bounds."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope.errors import UsageError
from normscope.kernels.statistics import MeanVariance, moments

METHODS = ("two-pass", "welford", "one-pass")
ORDERS = ("pairwise", "sequential")
ALL = list(itertools.product(METHODS, ORDERS))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def exact(row: Tensor) -> tuple[Fraction, Fraction]:
    values = [Fraction(value) for value in row.tolist()]
    mean = sum(values, Fraction()) / len(values)
    return mean, sum(((value - mean) ** 2 for value in values), Fraction()) / len(values)


def drawn(*shape: int, offset: float, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw, dtype=torch.float64) + offset).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(ALL),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(2, 60),
    offset=st.sampled_from([0.0, 1.0, -8.0, 60.0]),
    seed=st.integers(0, 1000),
)
def test_errors_stay_within_the_bounds_of_chan_golub_and_leveque(
    case: tuple, dtype: torch.dtype, width: int, offset: float, seed: int
) -> None:
    method, order = case
    x = drawn(1, width, offset=offset, seed=seed, dtype=dtype)
    mean, variance = exact(x[0])
    assume(variance > 0)
    assume(float(x.double().square().sum()) < torch.finfo(dtype).max)  # the bounds hold without overflow
    u = torch.finfo(dtype).eps / 2
    kappa = math.sqrt(1 + float(mean**2 / variance))
    n = (width if order == "sequential" else math.ceil(math.log2(width))) + 3
    bound = {
        "two-pass": n * u + (n * u * kappa) ** 2,
        "welford": n * u * kappa,
        "one-pass": n * u * kappa**2,
    }[method]
    found = moments(x, method=method, order=order)
    tiny = torch.finfo(dtype).tiny  # squares of small values underflow
    assert abs(float(found.variance) - float(variance)) <= 2 * bound * float(variance) + width * tiny
    size = math.sqrt(float(variance + mean**2))
    assert abs(float(found.mean) - float(mean)) <= n * u * size


@pytest.mark.parametrize(("method", "order"), ALL)
def test_only_the_one_pass_loses_all_digits_at_a_large_offset(method: str, order: str) -> None:
    """float32, mean/std 1e4: u κ² is 6, u κ is 6e-4."""
    x = drawn(20, 256, offset=1e4, dtype=torch.float32)
    variance = torch.tensor([float(exact(row)[1]) for row in x])
    error = float((moments(x, method=method, order=order).variance / variance - 1).abs().max())
    assert error > 0.5 if method == "one-pass" else error < 1e-2


@pytest.mark.parametrize(("method", "order"), ALL)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 65])
def test_float64_is_exact_and_rows_are_independent(method: str, order: str, width: int) -> None:
    x = drawn(2, 3, width, offset=1.0)
    found = moments(x, method=method, order=order)
    assert found.mean.shape == found.variance.shape == (2, 3)
    torch.testing.assert_close(found.mean, x.mean(-1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.variance, x.var(-1, correction=0), rtol=1e-12, atol=1e-13)
    alone = moments(x[1, 2], method=method, order=order)
    assert torch.equal(alone.variance, found.variance[1, 2])


@pytest.mark.parametrize(("method", "order"), ALL)
def test_the_arithmetic_is_that_of_the_dtype(method: str, order: str) -> None:
    """In float16, 300² is inf: the one-pass variance is not finite, and the others are right."""
    x = torch.tensor([299.0, 301.0, 299.0, 301.0])
    found = moments(x, method=method, order=order, dtype=torch.float16)
    assert found.variance.dtype == torch.float16
    assert math.isfinite(float(found.variance)) == (method != "one-pass")
    assert method == "one-pass" or float(found.variance) == 1
    assert float(moments(x, method=method, order=order).variance) == 1


def test_sequential_sums_stall_in_bfloat16() -> None:
    """256 + 1 is 256 in bfloat16, so that a sequential sum of ones stops there; halves do not."""
    ones = torch.ones(1024, dtype=torch.bfloat16)
    assert float(moments(ones, order="sequential").mean) == 0.25
    assert float(moments(ones, order="pairwise").mean) == 1


def test_each_addition_rounds_to_the_dtype() -> None:
    """In bfloat16 256 + 1 = 256 and 1 + 1 = 2, together 258. `torch.sum` adds in float32 and gives 260."""
    x = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert float(moments(x, order="pairwise").mean) == 258 / 4
    assert float(x.sum()) == 260


def test_results_differentiate() -> None:
    x = drawn(3, 5, offset=1.0).requires_grad_()
    for method, order in ALL:

        def both(x: Tensor, method: str = method, order: str = order) -> MeanVariance:
            return moments(x, method=method, order=order)

        assert torch.autograd.gradcheck(both, x)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "two_pass"}, 'the nearest name is "two-pass"'),
        ({"order": "pairs"}, "pairwise or sequential"),
    ],
)
def test_unknown_names_are_refused(options: dict, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        moments(torch.ones(3), **options)


@pytest.mark.parametrize("x", [torch.arange(3), torch.tensor(1.0), torch.ones(2, 0)])
def test_inputs_without_features_or_of_integers_are_refused(x: Tensor) -> None:
    with pytest.raises(UsageError, match="at least one feature"):
        moments(x)


@pytest.mark.parametrize(("method", "order"), ALL)
def test_a_variance_is_never_negative(method: str, order: str) -> None:
    """The one-pass difference of rows whose values are close is as often below 0 as above."""
    found = moments(drawn(50, 16, offset=1e4, dtype=torch.float32), method=method, order=order)
    assert float(found.variance.min()) >= 0


@pytest.mark.parametrize("method", ["two-pass", "one-pass"])
def test_sequential_sums_of_squares_stall_in_bfloat16(method: str) -> None:
    """x = ±1 has variance 1; a sequential sum of 1024 ones stops at 256."""
    x = torch.tensor([1.0, -1.0], dtype=torch.bfloat16).repeat(512)
    assert float(moments(x, method=method, order="sequential").variance) == 0.25
    assert float(moments(x, method=method, order="pairwise").variance) == 1


def test_welford_in_sequence_loses_what_halves_keep() -> None:
    """1024 values 0 and 2 in bfloat16: the M2 of a sequence stalls, that of halves is exact."""
    x = torch.tensor([0.0, 2.0], dtype=torch.bfloat16).repeat(512)
    assert float(moments(x, method="welford", order="pairwise").variance) == 1
    assert float(moments(x, method="welford", order="sequential").variance) < 0.5
