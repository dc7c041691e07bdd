"""Tests of methods × maps against the dense Jacobian: the chosen method, refusals, advice, memory."""

import time

import pytest
import torch
from jacobian_cases import CASES, Case, ConstantBackward, StraightThrough, dense_jacobian
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from normscope.linalg import JacobianOperator, Method, Status, TangentError, sigma_max

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
methods = pytest.mark.parametrize("method", list(Method))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@cases
@methods
def test_every_product_is_that_of_the_dense_jacobian(case: Case, method: Method) -> None:
    op, jacobian = JacobianOperator(case.f, case.x, method=method), case.dense
    assert op.method is method
    m, n = op.shape
    rtol = 1e-9 if op.round_off < 1e-15 else 1e-6
    close = {"rtol": rtol, "atol": rtol * float(1 + jacobian.norm())}
    v, u, many_v, many_u = random(n), random(m), random(5, n), random(3, m)
    torch.testing.assert_close(op.matvec(v), jacobian @ v, **close)
    torch.testing.assert_close(op.rmatvec(u), jacobian.T @ u, **close)
    torch.testing.assert_close(op.matmat(many_v), many_v @ jacobian.T, **close)
    torch.testing.assert_close(op.rmatmat(many_u), many_u @ jacobian, **close)
    torch.testing.assert_close(op.matmat(many_v[:2]), many_v[:2] @ jacobian.T, **close)  # fewer than before
    left, right = float(u @ op.matvec(v)), float(op.rmatvec(u) @ v)
    assert left == pytest.approx(right, rel=1e-6, abs=1e-6 * float(u.norm() * v.norm()))
    assert op.products == 1 + 1 + 5 + 3 + 2 + 2


@cases
def test_the_error_of_differences_is_no_more_than_they_say(case: Case) -> None:
    """In float32, for directions of all kinds: random, one coordinate, singular vectors."""
    x = case.x.float()
    op = JacobianOperator(lambda z: case.f(z.double()).float(), x, method="central differences")
    jacobian = dense_jacobian(case.f, x.double())
    norm = float(torch.linalg.matrix_norm(jacobian, 2))
    directions = torch.cat((torch.linalg.svd(jacobian)[2][:4], torch.eye(24).double()[:3], random(3, 24)))
    for v in directions:
        gap = float((op.matvec(v.float()).double() - jacobian @ v).norm()) / float(v.norm())
        assert gap <= 2 * op.round_off * max(norm, 1e-30)


def test_what_differences_find_is_not_converged_below_their_error() -> None:
    case = CASES[0]
    op = JacobianOperator(lambda z: case.f(z.double()).float(), case.x.float(), method="central differences")
    true = float(torch.linalg.matrix_norm(dense_jacobian(case.f, case.x.float().double()), 2))
    for tol, statuses in ((5e-2, {Status.CONVERGED, Status.EXACT}), (1e-6, {Status.NOT_CONVERGED})):
        found = sigma_max(op, tol=tol, max_products=200)
        assert found.status in statuses
        assert abs(found.value - true) <= found.error * found.value


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class OnceWithForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].cos()


def fused(x: Tensor) -> Tensor:
    x = x.reshape(1, 2, 3, 4)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


LOUD = {
    "once differentiable": (lambda x: x + OnceDifferentiable.apply(x), Method.CENTRAL_DIFFERENCES),
    "with forward mode": (OnceWithForwardMode.apply, Method.FORWARD_MODE),
    "fused attention": (fused, Method.CENTRAL_DIFFERENCES),
    "compiled": (torch.compile(lambda x: torch.tanh(x) * x, backend="aot_eager"), Method.FORWARD_MODE),
    "scaled dot product": (lambda x: F.scaled_dot_product_attention(x, x, x), Method.DOUBLE_BACKWARD),
    "of heads": (lambda x: F.scaled_dot_product_attention(*3 * [x.view(1, 2, 3, 4)]), Method.DOUBLE_BACKWARD),
    "checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=False), Method.DOUBLE_BACKWARD),
}


@pytest.mark.parametrize(("f", "method"), LOUD.values(), ids=LOUD)
def test_what_is_refused_falls_to_the_next_method(f, method: Method) -> None:
    x = random(4, 6)
    op = JacobianOperator(f, x)
    assert op.method is method
    assert ("no double backward" in op.note) == (method is not Method.DOUBLE_BACKWARD)
    assert ("no forward mode" in op.note) == (method is Method.CENTRAL_DIFFERENCES)
    v = random(24)
    step = 1e-5 * v.reshape(4, 6)
    expected = (f(x + step) - f(x - step)).reshape(-1) / 2e-5
    torch.testing.assert_close(op.matvec(v), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(op.matmat(torch.stack([v, -v]))[1], -expected, rtol=1e-5, atol=1e-6)


def test_reentrant_checkpoints_have_no_vjp_and_no_method_helps() -> None:
    with pytest.raises(TangentError, match="no central differences: autograd refuses"):
        JacobianOperator(lambda x: checkpoint(torch.sin, x, use_reentrant=True), random(4))


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_the_message_names_the_method_that_is_left(skip: float) -> None:
    def f(x: Tensor) -> Tensor:
        return skip * x + ConstantBackward.apply(x)

    x = random(40)
    with pytest.raises(TangentError, match='use method="central differences", which'):
        JacobianOperator(f, x)
    op = JacobianOperator(f, x, method="central differences")
    torch.testing.assert_close(op.matvec(torch.ones(40)), skip + x.cos(), rtol=1e-6, atol=1e-6)


@methods
@pytest.mark.parametrize("f", [StraightThrough.apply, lambda x: x + torch.tanh(3 * x).detach()])
def test_a_wrong_vjp_is_refused_by_every_method(f, method: Method) -> None:
    with pytest.raises(TangentError, match=r"contradicts|refuses"):
        JacobianOperator(f, random(40), method=method)
    with pytest.raises(TangentError, match="no method can measure this function"):
        JacobianOperator(f, random(40))


def test_unknown_methods_are_told_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'forward mode'"):
        JacobianOperator(torch.sin, random(4), method="forwardmode")


def test_kinks_are_no_wrong_derivative() -> None:
    weights = [torch.randn(64, 64) / 32**0.5 for _ in range(12)]

    def relus(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.relu(x @ weight)
        return x

    assert JacobianOperator(relus, torch.randn(16, 64)).method is Method.DOUBLE_BACKWARD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules_are_measured_in_a_float32_copy(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)).to(dtype)
    op = JacobianOperator(module, torch.randn(4, 6).to(dtype))
    assert op.dtype == torch.float32
    assert f"float32 copy of the {str(dtype).removeprefix('torch.')} module" in op.note
    assert {p.dtype for p in module.parameters()} == {dtype}
    with pytest.raises(ValueError, match="cannot be copied to float32"):
        JacobianOperator(lambda x: module(x), torch.randn(4, 6).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("closure", [False, True])
@methods
def test_everything_is_left_as_it_was_found(method: Method, closure: bool, device: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU(), nn.Linear(6, 6)).to(device)
    module[0].weight.grad = torch.ones(6, 6, device=device)
    module[3].bias.requires_grad_(False)
    wants = [p.requires_grad for p in module.parameters()]
    x, state = torch.randn(4, 6, device=device), torch.get_rng_state()
    op = JacobianOperator((lambda z: module(z)) if closure else module, x, method=method)
    jv = op.matvec(torch.ones(24))
    torch.testing.assert_close(jv, op.matmat(torch.ones(3, 24))[2])  # one mask
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    torch.testing.assert_close(jv, op.matvec(torch.ones(24)))  # whatever the generators do elsewhere
    assert [p.requires_grad for p in module.parameters()] == wants
    assert torch.equal(module[0].weight.grad, torch.ones(6, 6, device=device))
    assert module[3].weight.grad is None
    assert not x.requires_grad
    assert module.training
    assert not any(part._forward_hooks or part._backward_hooks for part in module.modules())


def test_parameters_want_their_gradient_again_after_an_exception() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.weight.requires_grad
            raise KeyError("inside")

    module = Fails(2, 2)
    with pytest.raises(KeyError, match="inside"):
        JacobianOperator(module, torch.randn(2))
    assert module.weight.requires_grad


def test_weights_that_change_under_a_held_graph_are_reported() -> None:
    module = nn.Linear(6, 6)
    op = JacobianOperator(module, torch.randn(6))
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(TangentError, match="modified by an inplace operation"):
        op.rmatvec(torch.ones(6))


def test_products_do_not_need_grad_mode() -> None:
    module, x, v = nn.Linear(6, 6), torch.randn(6), torch.randn(6)
    entry = torch.randn(6, requires_grad=True) * 1.0
    on_graph = JacobianOperator.on_graph(module(entry), entry)
    with torch.no_grad():
        expected = v @ module.weight.T
        torch.testing.assert_close(on_graph.matvec(v), expected)
        torch.testing.assert_close(JacobianOperator(module, x).matvec(v), expected)


def test_a_product_with_the_end_of_a_long_graph_does_not_search_all_of_it() -> None:
    def seconds(before: int) -> float:
        x = torch.randn(4, requires_grad=True)
        entry = x * 1.0
        for _ in range(before):
            entry = entry * 1.0
        op = JacobianOperator.on_graph(torch.tanh(entry), entry)
        v = torch.randn(4)
        op.matvec(v)  # builds the graph of the adjoint
        taken = []
        for _ in range(10):
            start = time.process_time()
            op.matvec(v)
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(before=30_000) < 5 * seconds(before=1)
