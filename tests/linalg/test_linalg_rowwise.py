"""The Jacobian of one row from copies of it, against the dense reference in float64."""

import pytest
import torch
from jacobian_cases import CASES, Case, dense_jacobian
from torch import Tensor
from torch.nn import functional as F

from normscope.linalg import TangentError, rowwise_jacobian

WIDE, TALL = (
    torch.randn(m, 24, generator=torch.Generator().manual_seed(m), dtype=torch.float64) for m in (5, 40)
)
X = CASES[0].x.reshape(24)
ROWWISE = [
    Case("mlp", lambda x: x + F.gelu(F.layer_norm(x, (24,)) @ WIDE.T) @ WIDE, X),
    Case("wide", lambda x: torch.tanh(x @ WIDE.T), X),
    Case("tall", lambda x: torch.sin(x @ TALL.T), X),
    Case("relu", lambda x: torch.relu(x @ TALL.T), X),
    Case("shaped", lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x, X.reshape(4, 6)),
    *(Case(case.name, case.f, case.x[0]) for case in CASES[:3]),
]


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("case", ROWWISE, ids=lambda case: case.name)
def test_it_is_the_dense_jacobian(case: Case, chunk: int | None) -> None:
    expected = dense_jacobian(lambda z: case.f(z.unsqueeze(0)), case.x)
    found = rowwise_jacobian(case.f, case.x, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not found.requires_grad


@pytest.mark.parametrize("case", ROWWISE, ids=lambda case: case.name)
def test_float32_is_close(case: Case) -> None:
    found = rowwise_jacobian(lambda x: case.f(x.double()).float(), case.x.float())
    torch.testing.assert_close(found.double(), rowwise_jacobian(case.f, case.x), rtol=1e-3, atol=1e-4)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def attends_to_other_rows(x: Tensor) -> Tensor:
    return (x @ x.T).softmax(-1) @ x


@pytest.mark.parametrize(
    "f", [centred, attends_to_other_rows, lambda x: x.sum(), lambda x: x.T, lambda x: x[:1]]
)
def test_what_mixes_rows_is_told(f) -> None:
    with pytest.raises(ValueError, match=r"not treated alike|expected [12] rows"):
        rowwise_jacobian(f, X)


def test_what_has_no_derivative_or_another_is_refused() -> None:
    with pytest.raises(TangentError, match="finite differences"):
        rowwise_jacobian(lambda x: x + torch.tanh(3 * x).detach(), X)
    with pytest.raises(TangentError, match="no path"):
        rowwise_jacobian(lambda x: x.detach(), X)
    with pytest.raises(ValueError, match="chunk=0"):
        rowwise_jacobian(lambda x: x, X, chunk=0)


def test_one_forward_of_the_copies_and_one_vjp() -> None:
    sizes: list[int] = []

    def counted(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return torch.tanh(x @ TALL.T)

    rowwise_jacobian(counted, X)
    assert sorted(sizes) == [1, 1, 2, 40]
