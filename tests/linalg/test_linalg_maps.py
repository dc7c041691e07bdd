"""Tests of maps made of maps against their dense matrices; mismatched shapes are reported."""

import numpy as np
import pytest
import torch
from drawn_maps import drawn, orthogonal
from torch import Tensor

from normscope.linalg import JacobianOperator
from normscope.linalg.golub_kahan import LinearMap
from normscope.linalg.maps import (
    Composition,
    Deflated,
    Matrix,
    Projected,
    Restriction,
    Shifted,
    Transposed,
    token_indices,
)
from normscope.linalg.subspaces import TokenProjector, dimension

A, B, SQUARE = drawn(7, 5, seed=1), drawn(4, 7, seed=2), drawn(6, 6, seed=3)
RIGHT, LEFT = orthogonal(6, seed=4)[:, :2], orthogonal(6, seed=5)[:, :3]
ROWS, COLUMNS = torch.tensor([4, 0, 2]), torch.tensor([1, 5])
EYE = torch.eye(6, dtype=torch.float64)


class Bare:
    """A map with the members of the protocol only."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.shape = matrix, tuple(matrix.shape)
        self.dtype, self.device = matrix.dtype, matrix.device

    def matvec(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.matrix.T @ u


def jacobian_operator(matrix: Tensor) -> LinearMap:
    x = torch.zeros(matrix.shape[1], dtype=torch.float64, requires_grad=True)
    return JacobianOperator.on_graph(matrix @ x, x)


def onto(basis: Tensor):
    return lambda v: v @ basis @ basis.T


CASES = {
    "matrix": (lambda make: Matrix(A), A),
    "transposed": (lambda make: Transposed(make(A)), A.T),
    "composition": (lambda make: Composition(make(B), make(A)), B @ A),
    "composition of three": (lambda make: Composition(make(A.T), make(B.T), make(B)), A.T @ B.T @ B),
    "restriction": (
        lambda make: Restriction(make(SQUARE), rows=ROWS, columns=COLUMNS),
        SQUARE[ROWS][:, COLUMNS],
    ),
    "rows": (lambda make: Restriction(make(SQUARE), rows=ROWS), SQUARE[ROWS]),
    "a token": (
        lambda make: Restriction(
            make(SQUARE), rows=token_indices(2, width=2), columns=token_indices(1, width=2)
        ),
        SQUARE[4:6, 2:4],
    ),
    "shifted": (lambda make: Shifted(make(SQUARE), alpha=0.5, beta=-2.0), 0.5 * EYE - 2 * SQUARE),
    "projected": (
        lambda make: Projected(make(SQUARE), left=LEFT, right=onto(RIGHT)),
        LEFT @ LEFT.T @ SQUARE @ RIGHT @ RIGHT.T,
    ),
    "deflated": (
        lambda make: Deflated(make(SQUARE), kernel=RIGHT, left_kernel=onto(LEFT)),
        (EYE - LEFT @ LEFT.T) @ SQUARE @ (EYE - RIGHT @ RIGHT.T),
    ),
    "deflated on one side": (
        lambda make: Deflated(make(SQUARE), kernel=RIGHT),
        SQUARE @ (EYE - RIGHT @ RIGHT.T),
    ),
}


@pytest.mark.parametrize("make", [Bare, Matrix, jacobian_operator], ids=["bare", "matrix", "jacobian"])
@pytest.mark.parametrize(("build", "dense"), CASES.values(), ids=CASES)
def test_products_are_those_of_the_dense_matrix(build, dense: Tensor, make) -> None:
    op = build(make)
    assert op.shape == dense.shape
    assert op.dtype == torch.float64
    m, n = op.shape
    v, u, many_v, many_u = drawn(n), drawn(m), drawn(3, n), drawn(2, m)
    torch.testing.assert_close(op.matvec(v), dense @ v)
    torch.testing.assert_close(op.rmatvec(u), dense.T @ u)
    torch.testing.assert_close(op.matmat(many_v), many_v @ dense.T)
    torch.testing.assert_close(op.rmatmat(many_u), many_u @ dense)
    assert op.products == 7
    torch.testing.assert_close(op @ v, dense @ v)
    torch.testing.assert_close(op @ many_v.T, dense @ many_v.T)
    torch.testing.assert_close(op.T @ u, dense.T @ u)
    torch.testing.assert_close((op.T @ op) @ v, dense.T @ dense @ v)
    np.testing.assert_allclose(op.to_scipy() @ v.numpy(), (dense @ v).numpy(), atol=1e-12)


@pytest.mark.parametrize(("build", "dense"), CASES.values(), ids=CASES)
def test_wrong_shapes_are_told_with_both_shapes(build, dense: Tensor) -> None:
    op = build(Matrix)
    m, n = op.shape
    for product, wrong in (
        (op.matvec, n + 1),
        (op.rmatvec, m + 1),
        (op.matmat, n + 1),
        (op.rmatmat, m + 1),
    ):
        shape = (wrong,) if product in (op.matvec, op.rmatvec) else (2, wrong)
        with pytest.raises(ValueError, match=r"shape .* for a map of shape") as told:
            product(torch.zeros(shape))
        assert str(shape) in str(told.value)
        assert str(op.shape) in str(told.value)
    assert op.products == 0


def test_maps_that_do_not_fit_are_reported() -> None:
    a, b = Matrix(A), Matrix(B)
    with pytest.raises(ValueError, match=r"shape \(7, 5\) after one of shape \(4, 7\)"):
        Composition(a, b)
    with pytest.raises(ValueError, match="no maps"):
        Composition()
    with pytest.raises(ValueError, match=r"\(7, 5\): expected a square"):
        Shifted(a)
    with pytest.raises(ValueError, match=r"see torch\.as_tensor"):
        Matrix(np.eye(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int64: expected a floating-point"):
        Matrix(torch.eye(2).long())
    with pytest.raises(ValueError, match="not empty"):
        Matrix(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"see torch\.nonzero"):
        Restriction(Matrix(torch.eye(2)), rows=torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"\(3,\): expected a matrix"):
        Matrix(torch.zeros(3))
    for wrong in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([1, 1])):
        with pytest.raises(ValueError, match=r"columns of a map of shape \(7, 5\)"):
            Restriction(a, columns=wrong)
    with pytest.raises(ValueError, match=r"\(6, 2\): expected \(5, r\)"):
        Deflated(a, kernel=RIGHT)
    with pytest.raises(ValueError, match="orthonormal"):
        Deflated(a, kernel=torch.ones(5, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="orthonormal"):
        Deflated(a, kernel=(1 + 1e-6) * orthogonal(5)[:, :2])


def test_a_basis_may_have_columns_of_zeros() -> None:
    basis = torch.cat((RIGHT, torch.zeros(6, 1)), 1)
    expected = SQUARE @ (EYE - RIGHT @ RIGHT.T)
    torch.testing.assert_close(Deflated(Matrix(SQUARE), kernel=basis) @ EYE, expected)
    assert dimension(basis, 6, torch.float64, EYE.device) == 2
    assert dimension(onto(LEFT), 6, torch.float64, EYE.device) == 3
    assert dimension(None, 6, torch.float64, EYE.device) == 0


def test_a_kernel_of_each_token() -> None:
    basis = torch.stack([orthogonal(3, seed=s)[:, :2] for s in range(4)])
    basis[2, :, 1] = 0
    dense = torch.block_diag(*(b @ b.T for b in basis))
    project = TokenProjector(basis)
    torch.testing.assert_close(project(torch.eye(12, dtype=torch.float64)), dense)
    torch.testing.assert_close(project(drawn(12)), dense @ drawn(12))
    assert project(drawn(5, 12).float()).dtype == torch.float32
    for kernel in (project, lambda v: project(v)):
        assert dimension(kernel, 12, torch.float64, basis.device) == 7
