"""Tests of batches by copies of x: the calls of f, and functions that treat copies differently."""

import pytest
import torch
from jacobian_cases import dense_jacobian
from torch import Tensor

from normscope.linalg import JacobianOperator, TangentError
from normscope.linalg.graph import KeptGraph


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


WEIGHT = random(9, 6)


def row_by_row(x: Tensor) -> Tensor:
    return torch.tanh(x @ WEIGHT.T)


def other_values_in_batches(x: Tensor) -> Tensor:
    y = row_by_row(x)
    return y + 1e-4 * y.mean(0) if x.dim() == 2 and len(x) > 2 else y  # too little for the adjoint test


def other_derivatives_in_batches(x: Tensor) -> Tensor:
    y = row_by_row(x)
    return y + (y - y.mean(0)) if x.dim() == 2 and len(x) > 2 else y  # of copies: y


def mixes_rows(x: Tensor) -> Tensor:
    y = row_by_row(x)
    return y + 1e-4 * y.cumsum(0) if x.dim() == 2 else y


class Rescaled(torch.autograd.Function):
    """A backward that divides by the size of its gradient and multiplies again: linear, its parts not."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        size = gradient.abs().max()
        return gradient / size * ctx.saved_tensors[0].cos() * size


@pytest.mark.parametrize(
    "f", [row_by_row, other_values_in_batches, other_derivatives_in_batches, mixes_rows, Rescaled.apply]
)
def test_batches_are_right_whatever_f_does_with_copies(f) -> None:
    x = random(6)
    op, jacobian = JacobianOperator(f, x), dense_jacobian(f, x)
    for _ in range(2):
        v, u = random(4, op.shape[1]), random(5, op.shape[0])
        torch.testing.assert_close(op.rmatmat(u), u @ jacobian)
        torch.testing.assert_close(op.matmat(v), v @ jacobian.T)
        torch.testing.assert_close(op.matvec(v[0]), jacobian @ v[0])


def test_a_batch_is_one_forward_of_copies_that_is_kept() -> None:
    shapes: list[tuple[int, ...]] = []

    def counted(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return row_by_row(x)

    op = JacobianOperator(counted, random(6))
    shapes.clear()
    op.rmatmat(random(5, 9))
    assert shapes[-1] == (5, 6)
    shapes.clear()
    op.matmat(random(5, 6))
    op.rmatmat(random(3, 9))
    assert not shapes


@pytest.mark.parametrize(
    ("f", "shape", "batch"),
    [
        (row_by_row, (4, 6), (12, 6)),  # along the axis that x has
        (lambda x: (x @ x.mT).softmax(-1) @ x, (4, 6), (3, 4, 6)),  # its own axis is mixed: along a new one
        (lambda x: (x @ x.mT).softmax(-1) @ x, (1, 4, 6), (3, 4, 6)),
    ],
)
def test_copies_go_along_an_axis_that_f_treats_row_by_row(f, shape, batch) -> None:
    shapes: list[tuple[int, ...]] = []

    def counted(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return f(x)

    x = random(*shape)
    op = JacobianOperator(counted, x)
    u = random(3, op.shape[0])
    torch.testing.assert_close(op.rmatmat(u), u @ dense_jacobian(f, x))
    assert shapes[-1] == batch


class LooksWhenNotZero(torch.autograd.Function):
    """g ↦ c·g whose backward reads c only for tangents that are not all zero."""

    @staticmethod
    def forward(ctx, gradient: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(c)
        return gradient * c

    @staticmethod
    def backward(ctx, tangent: Tensor) -> tuple[Tensor, None]:
        return (tangent * ctx.saved_tensors[0] if bool(tangent.any()) else tangent), None


class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return LooksWhenNotZero.apply(gradient, ctx.saved_tensors[0].cos())


def test_what_was_let_go_is_told_when_it_is_asked_for() -> None:
    x = random(6).requires_grad_()
    graph = KeptGraph(Looks.apply(x), x, x, lean=True)
    torch.testing.assert_close(graph.push(torch.ones_like(x)), x.detach().cos())
    torch.testing.assert_close(graph.push(x.detach()), x.detach().cos() * x.detach())
    graph = KeptGraph(Looks.apply(x), x, x, lean=True)
    graph.push(torch.zeros_like(x))
    with pytest.raises(TangentError, match="a part of the graph that the first product did not"):
        graph.push(torch.ones_like(x))
