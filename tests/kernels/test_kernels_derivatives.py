"""Derivatives beyond the first are right for every backend, in every way that PyTorch has; none is zero."""

import itertools
from collections.abc import Callable

import pytest
import torch
from kernel_laws import DEVICE, F32, F64, TRITON, Case
from torch import Tensor
from torch.autograd import forward_ad

from normscope.kernels import formula
from normscope.kernels.dispatch import KERNELS
from normscope.kernels.function import Fused
from normscope.kernels.residual_norm import residual_norm

pytestmark = [
    pytest.mark.usefixtures("no_function_modes"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # torch's own
    pytest.mark.usefixtures("cheap_compiler"),
]
SHAPE = (3, 4, 8)
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BACKENDS = pytest.mark.parametrize("backend", ["compile", TRITON])
SETTINGS = [
    {"norm": norm, "prenorm": prenorm, "alpha": alpha, "stream_dtype": dtype}
    for (norm, prenorm), (alpha, dtype) in itertools.product(
        (("layer", True), ("rms", False), ("layer", False)), ((1.0, torch.float32), (1.7, torch.bfloat16))
    )
]


def scalar(backend: str, settings: dict, seed: int | None = None) -> Function:
    """A curved function of both outputs."""

    def f(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed, stream = outputs(backend, settings, seed)(x, branch, weight, bias)
        return (normed.sin() * normed).sum() + (stream.float().cos() * stream.float()).sum()

    return f


def outputs(backend: str, settings: dict, seed: int | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    def f(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        more = {}
        if seed is not None:
            more = {"dropout_p": 0.4, "generator": torch.Generator(DEVICE).manual_seed(seed)}
        return residual_norm(x, branch, weight=weight, bias=bias, backend=backend, **settings, **more)

    return f


def inputs(dtype: torch.dtype = F32, *, grad: bool = False) -> list[Tensor]:
    shapes = (SHAPE, SHAPE, SHAPE[-1:], SHAPE[-1:])
    return [torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_(grad) for shape in shapes]


def dual_numbers(f: Function, settings: dict) -> list[Tensor]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(each, torch.randn_like(each)) for each in inputs()]
        return [forward_ad.unpack_dual(f(*duals)).tangent]


def dual_numbers_with_a_graph(f: Function, settings: dict) -> list[Tensor]:
    leaves = inputs(grad=True)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(each, torch.randn_like(each)) for each in leaves]
        tangent = forward_ad.unpack_dual(f(*duals)).tangent
        return list(torch.autograd.grad(tangent, leaves))


def func_jvp(f: Function, settings: dict) -> list[Tensor]:
    return [torch.func.jvp(f, tuple(inputs()), tuple(inputs()))[1]]


def func_grad(f: Function, settings: dict) -> list[Tensor]:
    return list(torch.func.grad(f, argnums=(0, 1, 2, 3))(*inputs()))


def hessian(f: Function, settings: dict) -> list[Tensor]:
    given = inputs()
    return [torch.func.hessian(lambda w: f(given[0], given[1], w, given[3]))(given[2])]


def per_sample_gradients(f: Function, settings: dict) -> list[Tensor]:
    return list(torch.vmap(torch.func.grad(f, argnums=(0, 2)), in_dims=(0, 0, None, None))(*inputs()))


def vmapped(f: Function, settings: dict) -> list[Tensor]:
    return [torch.vmap(f, in_dims=(0, None, None, 0))(*(each.to(F32) for each in vmap_inputs()))]


def vmap_inputs() -> list[Tensor]:
    x, branch, weight, bias = inputs()
    return [x, branch[0], weight, bias.expand(SHAPE[0], -1) * torch.arange(1, SHAPE[0] + 1)[:, None].to(bias)]


def double_backward(f: Function, settings: dict) -> list[Tensor]:
    leaves = inputs(grad=True)
    first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    along = [torch.randn_like(each) for each in leaves]
    return list(torch.autograd.grad(first, leaves, along))


def functional_hvp(f: Function, settings: dict) -> list[Tensor]:
    return list(torch.autograd.functional.hvp(f, tuple(inputs()), tuple(inputs()))[1])


def batched_backward(f: Function, settings: dict) -> list[Tensor]:
    """Several gradients at once through one graph."""
    leaves = inputs(grad=True)
    value = f(*leaves)
    rows = torch.tensor([1.0, 2.0, -3.0], device=DEVICE)
    return list(torch.autograd.grad(value, leaves, rows, is_grads_batched=True))


def dual_backward(f: Function, settings: dict) -> list[Tensor]:
    """A graph built without tangents, and a gradient that has one."""
    leaves = inputs(grad=True)
    value = f(*leaves)
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones_like(value), torch.full_like(value, 0.3))
        found = torch.autograd.grad(value, leaves, grad)
        return [forward_ad.unpack_dual(each).tangent for each in found]


WAYS = [
    dual_numbers,
    dual_numbers_with_a_graph,
    func_jvp,
    func_grad,
    hessian,
    per_sample_gradients,
    vmapped,
    double_backward,
    functional_hvp,
    batched_backward,
    dual_backward,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("settings", SETTINGS[::2], ids=str)
@BACKENDS
def test_derivatives_are_those_of_the_formula(way: Callable, settings: dict, backend: str) -> None:
    torch.manual_seed(1)
    exact = way(scalar("eager", settings), settings)
    torch.manual_seed(1)
    found = way(scalar(backend, settings), settings)
    for value, right in zip(found, exact, strict=True):
        assert float(right.abs().max()) > 1e-2
        torch.testing.assert_close(value, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@BACKENDS
def test_second_derivatives_know_the_mask(settings: dict, backend: str) -> None:
    """Against central differences of the gradient."""
    if settings["stream_dtype"] != F32:
        settings = settings | {"stream_dtype": F32}
    f, leaves = scalar(backend, settings, seed=5), inputs(grad=True)
    along = [torch.randn_like(each) for each in leaves]
    first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(first, leaves, along)

    def gradient(step: float) -> list[Tensor]:
        moved = [
            (each + step * way).detach().requires_grad_() for each, way in zip(leaves, along, strict=True)
        ]
        return list(torch.autograd.grad(f(*moved), moved))

    differences = [(up - down) / 0.02 for up, down in zip(gradient(0.01), gradient(-0.01), strict=True)]
    for value, right in zip(second, differences, strict=True):
        assert float((value - right).abs().max()) <= 0.02 * float(right.abs().max())


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("seed", [None, 5])
def test_eager_derivatives_are_those_of_finite_differences(
    norm: str, prenorm: bool, seed: int | None
) -> None:
    f = outputs("eager", {"norm": norm, "prenorm": prenorm, "alpha": 1.3}, seed)
    given = tuple(each[:1, :2, :4] if each.dim() == 3 else each[:4] for each in inputs(F64))
    given = tuple(each.detach().requires_grad_() for each in given)
    assert torch.autograd.gradcheck(f, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("prenorm", [True, False])
def test_the_written_backward_is_that_of_autograd(norm: str, prenorm: bool) -> None:
    case = Case((3, 5), (F64, F64, F64), norm, prenorm=prenorm, alpha=1.3, drop=0.5)
    x, branch, weight, bias = given = case.inputs()
    form, keep = form_of(case), torch.rand(case.shape, device=DEVICE) < 0.5
    value = formula.forward(form, (x, branch, weight, bias), keep)
    grads = (torch.randn_like(value[0]), torch.randn_like(value[1]))
    exact = torch.autograd.grad(value, given, grads)
    found = formula.backward(form, formula.summed(form, x, branch, keep), weight, bias, keep, grads)
    for value, right in zip(found, exact, strict=True):
        torch.testing.assert_close(value, right)


@BACKENDS
def test_gains_have_gradients_where_the_stream_has_none(backend: str) -> None:
    x, branch, weight, bias = inputs(grad=True)
    f, exact = outputs(backend, {}), outputs("eager", {})
    for leaves in ([weight], [bias], [weight, bias], [x]):
        given = [
            each if any(each is one for one in leaves) else each.detach()
            for each in (x, branch, weight, bias)
        ]
        found = torch.autograd.grad(f(*given)[0].sin().sum(), leaves)
        for value, right in zip(
            found, torch.autograd.grad(exact(*given)[0].sin().sum(), leaves), strict=True
        ):
            torch.testing.assert_close(value, right)


def form_of(case: Case):
    from normscope.kernels.form import Form

    return Form(case.norm, 1e-3, case.alpha, case.drop, case.prenorm, *case.dtypes)


@BACKENDS
def test_a_fused_operation_called_directly_refuses_tangents_and_transforms(backend: str) -> None:
    """`residual_norm` keeps them away from it; without it, PyTorch refuses."""
    case = Case()
    x, branch, weight, bias = (each.detach() for each in case.inputs())

    def apply(x: Tensor) -> Tensor:
        return Fused.apply(KERNELS[backend], form_of(case), None, x, branch, weight, bias)[0]

    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jvp|forward mode"):
        apply(forward_ad.make_dual(x, torch.ones_like(x)))
    for transform in (torch.func.grad(lambda x: apply(x).sum()), torch.vmap(apply)):
        with pytest.raises(RuntimeError, match="setup_context"):
            transform(x)


@BACKENDS
def test_ordinary_calls_take_the_kernel(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests would compare the formula with itself."""
    calls = []
    kernel = KERNELS[backend]
    for part in ("forward", "backward"):
        monkeypatch.setattr(kernel, part, counted(getattr(kernel, part), part, calls))
    leaves = inputs(grad=True)
    scalar(backend, {})(*leaves).backward()
    assert calls == ["forward", "backward"]
    calls.clear()
    with torch.no_grad():
        scalar(backend, {})(*leaves)
    assert calls == ["forward"]
    calls.clear()
    torch.func.grad(scalar(backend, {}))(*inputs())
    assert calls == []


def counted(part: Callable, name: str, calls: list[str]) -> Callable:
    def run(*args, **more):
        calls.append(name)
        return part(*args, **more)

    return run
