"""Mean and variance of rows by three algorithms, in the arithmetic of one dtype.

Every operation rounds to that dtype, each addition of a sum too. `torch.sum` is not used, because it adds
half precision in float32. The functions show what an algorithm loses in a dtype; they are not fast.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from normscope.errors import UsageError, suggest

Method = Literal["two-pass", "welford", "one-pass"]
Order = Literal["pairwise", "sequential"]


class MeanVariance(NamedTuple):
    """Mean and variance (division by d, not d − 1) of each row, of shape (…)."""

    mean: Tensor
    variance: Tensor


def moments(
    x: Tensor, *, method: Method = "two-pass", order: Order = "pairwise", dtype: torch.dtype | None = None
) -> MeanVariance:
    """Mean and variance of each row of x (…, d).

    Let κ = √(1 + mean²/variance), u the unit roundoff of the dtype, and n = d in sequential order or log₂ d
    in pairwise order. Without overflow, the variance has a relative error of about n u + (n u κ)² at most for
    "two-pass", n u κ for "welford" and n u κ² for "one-pass" (Chan, Golub and LeVeque 1983).

    Args:
        x: floating-point numbers.
        method: "two-pass": mean = Σ x/d, then Σ (x − mean)²/d. "one-pass": Σ x²/d − mean², cut off at 0.
            "welford": running mean and M2, updated by one value or merged with another running pair.
        order: "sequential" adds values from the first to the last. "pairwise" adds halves, as parallel
            reductions do; Welford's pairs are then merged by Chan's formula.
        dtype: the arithmetic. Default: that of x.

    Raises:
        UsageError: x is not floating-point or has no feature, or the method or order is unknown.

    Source: Welford 1962, "Note on a method for calculating corrected sums of squares and products"; Chan,
        Golub and LeVeque 1983, "Algorithms for computing the sample variance".
    """
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        raise UsageError(
            f'method="{method}"', f"one of {known}", suggest(method, _METHODS, "choose one of these")
        )
    if order not in _ORDERS:
        raise UsageError(
            f'order="{order}"', "pairwise or sequential", suggest(order, _ORDERS, "choose one of these")
        )
    if not x.dtype.is_floating_point or x.ndim == 0 or x.shape[-1] == 0:
        raise UsageError(
            f"x of shape {tuple(x.shape)} and dtype {x.dtype}",
            "a floating-point tensor with at least one feature",
            "check what is passed as x",
        )
    return _METHODS[method](x.to(dtype or x.dtype), order)


def _two_pass(x: Tensor, order: Order) -> MeanVariance:
    mean = _sum(x, order) / x.shape[-1]
    return MeanVariance(mean, _sum((x - mean[..., None]).square(), order) / x.shape[-1])


def _one_pass(x: Tensor, order: Order) -> MeanVariance:
    mean = _sum(x, order) / x.shape[-1]
    return MeanVariance(mean, (_sum(x.square(), order) / x.shape[-1] - mean.square()).clamp(min=0))


def _welford(x: Tensor, order: Order) -> MeanVariance:
    mean, squares = _chan(x) if order == "pairwise" else _running(x)
    return MeanVariance(mean, squares / x.shape[-1])


def _running(x: Tensor) -> tuple[Tensor, Tensor]:
    """Welford's mean and M2, one value after the other."""
    mean, squares = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for count, value in enumerate(x.unbind(-1), 1):
        before = value - mean
        mean = mean + before / count
        squares = squares + before * (value - mean)
    return mean, squares


def _chan(x: Tensor) -> tuple[Tensor, Tensor]:
    """Welford's mean and M2 by halves: with δ = m_b − m_a, mean = m_a + δ n_b/n and M2 += δ² n_a n_b/n."""
    mean, squares, counts = x, torch.zeros_like(x), torch.ones(x.shape[-1], dtype=torch.float64)
    while mean.shape[-1] > 1:
        if mean.shape[-1] % 2:  # an empty partner has weight 0
            mean, squares, counts = (functional.pad(each, (0, 1)) for each in (mean, squares, counts))
        (mean, other), (squares, more), (left, right) = (
            each.unflatten(-1, (-1, 2)).unbind(-1) for each in (mean, squares, counts)
        )
        counts = left + right
        distance = other - mean
        mean = mean + distance * (right / counts).to(x)
        squares = squares + more + distance.square() * (left * right / counts).to(x)
    return mean[..., 0], squares[..., 0]


def _sum(x: Tensor, order: Order) -> Tensor:
    """Sum over the last dimension; each addition rounds to the dtype of x."""
    if order == "sequential":
        total = torch.zeros_like(x[..., 0])
        for value in x.unbind(-1):
            total = total + value
        return total
    while x.shape[-1] > 1:
        x = functional.pad(x, (0, x.shape[-1] % 2))
        left, right = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = left + right
    return x[..., 0]


_METHODS: dict[str, Callable[[Tensor, Order], MeanVariance]] = {
    "two-pass": _two_pass,
    "welford": _welford,
    "one-pass": _one_pass,
}
_ORDERS = ("pairwise", "sequential")
