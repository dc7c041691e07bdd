"""Tests of `restricted_jacobian` against rows and columns of autograd's Jacobian in float64."""

import pytest
import torch
from jacobian_cases import CASES, Case, ConstantBackward
from torch import Tensor

from normscope.linalg import JacobianOperator, Matrix, TangentError, restricted_jacobian, token_indices

BLOCKS = [case for case in CASES if case.x.shape == (1, 4, 6) and case.dense.shape == (24, 24)]
LAST, FIRST = token_indices(3, width=6), token_indices(0, width=6)


def on_graph(case: Case) -> JacobianOperator:
    x = case.x.clone().requires_grad_()
    return JacobianOperator.on_graph(case.f(x), x)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_one_token_is_the_block_of_the_whole_jacobian(case: Case) -> None:
    for op in (JacobianOperator(case.f, case.x), on_graph(case)):
        for rows, columns in ((LAST, LAST), (LAST, FIRST), (FIRST, LAST)):
            found = restricted_jacobian(op, rows, columns, chunk=4)
            close(found, case.dense[rows][:, columns])


def test_indices_keep_their_order_and_none_means_all() -> None:
    case = BLOCKS[0]
    rows, columns = torch.tensor([20, 3, 11]), torch.tensor([7, 0])
    close(restricted_jacobian(on_graph(case), rows, columns), case.dense[rows][:, columns])
    close(restricted_jacobian(on_graph(case), rows), case.dense[rows])
    close(restricted_jacobian(on_graph(case), columns=columns), case.dense[:, columns])


@pytest.mark.parametrize(
    ("rows", "columns", "spent"), [(LAST, FIRST, 6), (LAST[:2], None, 2), (None, FIRST[:3], 3)]
)
def test_the_smaller_side_is_paid_for(rows: Tensor | None, columns: Tensor | None, spent: int) -> None:
    op = on_graph(BLOCKS[0])
    restricted_jacobian(op, rows, columns)
    assert op.products == spent


def test_a_square_part_needs_no_second_derivative() -> None:
    x = torch.linspace(0.1, 1.0, 24, dtype=torch.float64, requires_grad=True)
    op = JacobianOperator.on_graph(ConstantBackward.apply(x), x)
    close(restricted_jacobian(op, LAST, LAST, chunk=1), torch.diag(x.detach().cos())[LAST][:, LAST])
    with pytest.raises(TangentError):
        restricted_jacobian(op, columns=LAST)


def test_what_the_map_does_not_have_is_refused() -> None:
    op = Matrix(torch.eye(4))
    with pytest.raises(ValueError, match="columns of a map of shape"):
        restricted_jacobian(op, columns=torch.tensor([4]))
    with pytest.raises(ValueError, match="expected different indices"):
        restricted_jacobian(op, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="chunk=0"):
        restricted_jacobian(op, chunk=0)
