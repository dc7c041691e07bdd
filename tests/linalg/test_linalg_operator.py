"""Tests of operators against the dense Jacobian in float64; silently wrong derivatives are refused."""

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from jacobian_cases import CASES, Case, ConstantBackward, StraightThrough
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from normscope.linalg import JacobianOperator, TangentError, dense, restricted_jacobian

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def held(case: Case) -> JacobianOperator:
    """The operator from tensors in the middle of a graph, not from leaves."""
    root = case.x.clone().requires_grad_()
    inputs = root * 1.0
    return JacobianOperator.on_graph(case.f(inputs) * 1.0, inputs)


def random(size: int, *more: int) -> Tensor:
    return torch.randn(size, *more, dtype=torch.float64)


@cases
@pytest.mark.parametrize(
    "make", [held, lambda case: JacobianOperator(case.f, case.x)], ids=["on graph", "function"]
)
def test_products_are_those_of_the_dense_jacobian(case: Case, make) -> None:
    op, jacobian = make(case), case.dense
    assert op.shape == jacobian.shape
    m, n = op.shape
    for _ in range(2):  # the second time the held graph is used again
        v, u = random(n), random(m)
        torch.testing.assert_close(op @ v, jacobian @ v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(op.T @ u, jacobian.T @ u, rtol=1e-9, atol=1e-11)
    right, left = random(n, 3), random(m, 2)
    torch.testing.assert_close(op @ right, jacobian @ right, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(op.T @ left, jacobian.T @ left, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dense(op, chunk=7), jacobian, rtol=1e-9, atol=1e-11)
    some = torch.tensor([m - 1, 0])
    torch.testing.assert_close(restricted_jacobian(op, some), jacobian[some], rtol=1e-9, atol=1e-11)


@cases
def test_tangents_are_central_finite_differences(case: Case) -> None:
    op = held(case)
    v, h = random(op.shape[1]), 1e-6
    step = h * v.reshape(case.x.shape)
    expected = (case.f(case.x + step) - case.f(case.x - step)).reshape(-1) / (2 * h)
    torch.testing.assert_close(op @ v, expected, rtol=1e-6, atol=1e-7)


@cases
def test_scipy_sees_the_same_map(case: Case) -> None:
    linear, jacobian = held(case).to_scipy(), case.dense.numpy()
    assert linear.dtype == np.float64
    v, u = np.ones(linear.shape[1]), np.ones(linear.shape[0])
    np.testing.assert_allclose(linear @ v, jacobian @ v, atol=1e-10)
    np.testing.assert_allclose(linear.T @ u, jacobian.T @ u, atol=1e-10)
    np.testing.assert_allclose(held(case).T.to_scipy() @ u, jacobian.T @ u, atol=1e-10)


def test_scipy_finds_singular_values_through_it() -> None:
    case = CASES[0]
    values = scipy.sparse.linalg.svds(held(case).to_scipy(), k=3, return_singular_vectors=False)
    expected = torch.linalg.svdvals(case.dense)[:3].flip(0)
    np.testing.assert_allclose(np.sort(values), expected.numpy(), rtol=1e-8)


def test_products_are_counted_once_each_and_shared_with_the_transpose() -> None:
    op = JacobianOperator(CASES[0].f, CASES[0].x)
    assert op.products == 0  # the comparison with differences is set-up
    n = op.shape[1]
    op @ random(n)
    op.T @ random(n)
    op @ random(n, 3)
    assert op.products == 5
    dense(op)
    assert op.products == 5 + n
    assert op.T.T is op


def test_submap_of_a_held_graph_from_an_edge_before_an_in_place_op() -> None:
    root = random(3, 4).requires_grad_()
    x = root * 1
    edge = torch.autograd.graph.get_gradient_edge(x)
    before = x.detach().clone()
    x += torch.tanh(x)
    assert not JacobianOperator.on_graph(x.sum(1), before).connected()
    op = JacobianOperator.on_graph(x.sum(1), before.requires_grad_(), edge=edge)
    assert op.connected()
    jacobian = torch.autograd.functional.jacobian(lambda z: (z + z.tanh()).sum(1), before).reshape(3, 12)
    torch.testing.assert_close(dense(op), jacobian)


def test_wrong_sizes_and_dtypes_are_reported() -> None:
    op = held(CASES[0])
    with pytest.raises(ValueError, match=r"Jv: a tensor of shape \(3,\).*expected \(24,\)"):
        op @ random(3)
    with pytest.raises(ValueError, match=r"\(3,\).*expected \(24,\)"):
        op.T @ random(3)
    with pytest.raises(ValueError, match="floating-point"):
        JacobianOperator.on_graph(torch.ones(2), torch.ones(2, dtype=torch.int64))


class HalfBackward(ConstantBackward):
    """A backward that leaves autograd by half: Jv is silently too small."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (0.5 * gradient + 0.5 * gradient.detach()) * x.cos()


class Honest(ConstantBackward):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


@pytest.mark.parametrize("function", [ConstantBackward, HalfBackward])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: lambda x: x + f(x)], ids=["alone", "beside a skip"])
def test_tangents_that_contradict_the_adjoint_are_refused(function, wrap) -> None:
    x = random(40).requires_grad_()
    op = JacobianOperator.on_graph(wrap(function.apply)(x), x)
    op.T @ random(40)  # Jᵀu alone is right
    with pytest.raises(TangentError, match=r"contradicts Jᵀu"):
        op @ random(40)


@pytest.mark.parametrize("function", [ConstantBackward, HalfBackward, StraightThrough])
def test_functions_whose_tangent_is_not_theirs_are_refused(function) -> None:
    with pytest.raises(TangentError, match=r"contradicts|finite differences"):
        JacobianOperator(function.apply, random(40))


def test_a_part_without_gradient_is_refused_where_the_function_is_known() -> None:
    def skips(x: Tensor) -> Tensor:
        with torch.no_grad():
            branch = torch.tanh(3 * x)
        return x + branch

    with pytest.raises(TangentError, match="finite differences"):
        JacobianOperator(skips, random(40))


def test_an_honest_custom_function_passes_in_float32_too() -> None:
    x = torch.randn(40)
    op = JacobianOperator(Honest.apply, x)
    torch.testing.assert_close(op @ torch.ones(40), x.cos())
    torch.testing.assert_close(dense(op), torch.diag(x.cos()))  # vmap has no rule: one by one


def test_fused_attention_is_refused_and_the_math_backend_is_not() -> None:
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused = F.scaled_dot_product_attention(x, x, x)
    with pytest.raises(TangentError, match="autograd refuses"):
        JacobianOperator.on_graph(fused, x) @ torch.randn(256)
    with sdpa_kernel(SDPBackend.MATH):
        op = JacobianOperator(lambda t: F.scaled_dot_product_attention(t, t, t), x)
    assert torch.isfinite(op @ torch.randn(256)).all()


@torch.library.custom_op("normscope_tests::bare_sine", mutates_args=())
def bare_sine(x: Tensor) -> Tensor:
    return x.sin()


def test_a_custom_op_without_a_backward_is_refused() -> None:
    x = random(8)
    with pytest.raises(TangentError):
        JacobianOperator(lambda t: t + bare_sine(t), x) @ random(8)


def test_graphs_without_a_path_are_refused() -> None:
    x, other = random(4).requires_grad_(), random(4).requires_grad_()
    for outputs in (other * 2, (x * 2).detach()):
        op = JacobianOperator.on_graph(outputs, x)
        assert not op.connected()
        for product in (op.matvec, op.rmatvec):
            with pytest.raises(TangentError, match=r"no path|not in a graph"):
                product(random(4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_graphs_are_right_or_refused(reentrant: bool) -> None:
    case = CASES[0]
    x = case.x.clone().requires_grad_()
    op = JacobianOperator.on_graph(checkpoint(case.f, x, use_reentrant=reentrant), x)
    v = random(op.shape[1])
    if reentrant:
        with pytest.raises(TangentError, match="autograd refuses"):
            op @ v
    else:
        torch.testing.assert_close(op @ v, case.dense @ v)
