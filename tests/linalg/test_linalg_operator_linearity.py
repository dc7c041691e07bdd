"""Tests of homogeneous, non-linear backwards, which agree with Jv at the u that built the graph."""

import pytest
import torch
from torch import Tensor

from normscope.linalg import JacobianOperator, Status, TangentError, dense, sigma_max


class Guided(torch.autograd.Function):
    """Identity; the backward passes positive gradients only, as guided backpropagation does."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.relu()


class Absolute(Guided):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.abs()


class Identity(Guided):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


BEFORE, AFTER = (
    torch.randn(30, 30, generator=torch.Generator().manual_seed(s), dtype=torch.float64) / 30**0.5
    for s in (1, 2)
)
not_linear = pytest.mark.parametrize("function", [Guided, Absolute])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def on_graph(
    function: type[Guided], dtype: torch.dtype = torch.float64, *, seed: int = 0
) -> JacobianOperator:
    x = torch.ones(30, dtype=dtype, requires_grad=True)
    y = function.apply(x @ BEFORE.T.to(dtype)) @ AFTER.T.to(dtype)
    return JacobianOperator.on_graph(y, x, seed=seed)


@dtypes
@not_linear
def test_singular_values_through_it_are_refused(function, dtype: torch.dtype) -> None:
    for seed in range(5):
        with pytest.raises(TangentError, match=r"contradicts Jᵀu|not linear"):
            sigma_max(on_graph(function, dtype, seed=seed))


@not_linear
def test_a_transposed_product_is_held_against_the_first_jv(function) -> None:
    op = on_graph(function)
    op @ torch.randn(30, dtype=torch.float64)
    for size in (1e-9, 1.0, 1e9):  # whatever the length
        with pytest.raises(TangentError, match="contradicts Jᵀu"):
            op.T @ (size * torch.randn(30, dtype=torch.float64))


@dtypes
@not_linear
def test_batches_are_refused_where_no_jv_was_taken(function, dtype: torch.dtype) -> None:
    with pytest.raises(TangentError, match="not linear in u"):
        dense(on_graph(function, dtype))
    with pytest.raises(TangentError, match="not linear in u"):
        on_graph(function, dtype).rmatmat(torch.randn(2, 30, dtype=dtype))


@dtypes
def test_a_linear_backward_passes_and_the_sum_is_not_counted(dtype: torch.dtype) -> None:
    op = on_graph(Identity, dtype)
    torch.testing.assert_close(dense(op), (AFTER @ BEFORE).to(dtype))
    assert op.products == 30
    op.T @ torch.zeros(30, dtype=dtype)
    assert sigma_max(op).status is not Status.NOT_CONVERGED
    for size in (1e-9, 1e9):
        first, u = on_graph(Identity, dtype), torch.randn(30, dtype=dtype)
        first @ (size * torch.randn(30, dtype=dtype))
        torch.testing.assert_close(first.T @ u, (AFTER @ BEFORE).to(dtype).T @ u, rtol=1e-4, atol=1e-5)


@not_linear
def test_it_is_refused_where_the_function_is_known(function) -> None:
    def f(x: Tensor) -> Tensor:
        return function.apply(x @ BEFORE.T) @ AFTER.T

    for method in (None, "central differences"):
        with pytest.raises(TangentError):
            dense(JacobianOperator(f, torch.ones(30, dtype=torch.float64), method=method))
