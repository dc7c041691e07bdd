"""Arguments of `residual_norm` that are taken or refused, dropout, and the choice of a backend."""

from typing import Any

import pytest
import torch
from kernel_laws import BF16, DEVICE, F32, F64, TRITON, Case, cotangents, results

from normscope.errors import UsageError
from normscope.kernels import residual_norm
from normscope.kernels.dispatch import (
    COMPILE_FROM,
    KERNELS,
    TRITON_FROM,
    TRITON_TRAINING_FROM,
    kernel_for,
)
from normscope.kernels.form import Form
from normscope.kernels.triton_kernel import TritonKernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # torch's own
    pytest.mark.usefixtures("cheap_compiler"),
]
BACKENDS = pytest.mark.parametrize("backend", ["eager", "compile", TRITON])
X = torch.ones(2, 4)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": X[:1]}, r"x of shape \(1, 4\) and branch of shape \(2, 4\): expected one shape"),
    ({"branch": torch.ones(2, 5)}, "one shape"),
    ({"x": torch.ones(()), "branch": torch.ones(())}, "one shape"),
    ({"x": torch.ones(2, 0), "branch": torch.ones(2, 0)}, "D at least 1"),
    ({"weight": torch.ones(3)}, r"weight of shape \(3,\) .* expected \(4,\)"),
    ({"bias": torch.ones(1, 4)}, r"bias of shape \(1, 4\)"),
    ({"x": X.long(), "branch": X.long()}, "x of dtype torch.int64: expected float16"),
    ({"branch": X.bool()}, "branch of dtype torch.bool"),
    ({"weight": torch.ones(4, dtype=torch.complex64)}, "weight of dtype torch.complex64"),
    ({"x": X.to(torch.float8_e4m3fn)}, "x of dtype torch.float8_e4m3fn"),
    ({"branch": X.to_sparse()}, "branch of layout torch.sparse_coo"),
    ({"branch": X.to("meta")}, "x on cpu, branch on meta: expected one device; move all of them to cpu"),
    ({"weight": torch.ones(4, device="meta")}, "weight on meta"),
    ({"x": [1.0]}, "x of type list"),
    ({"bias": 0.0}, "bias of type float: expected a tensor or None"),
    ({"norm": "layernorm"}, 'norm=\'layernorm\': expected "layer" or "rms"; the nearest name is "layer"'),
    ({"norm": None}, "norm=None"),
    ({"eps": -1e-5}, "eps=-1e-05"),
    ({"eps": float("nan")}, "eps=nan"),
    ({"alpha": float("inf")}, "alpha=inf"),
    ({"alpha": torch.ones(())}, "multiply x by a learnt factor"),
    ({"dropout_p": 1.1}, "dropout_p=1.1: expected a probability"),
    ({"dropout_p": True}, "dropout_p=True"),
    ({"stream_dtype": torch.int32}, "stream_dtype=torch.int32"),
    ({"stream_dtype": "float32"}, "stream_dtype='float32'"),
    ({"backend": "tritn"}, 'the nearest name is "triton"'),
    ({"generator": 3}, "generator of type int"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_calls_are_refused_with_advice(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        residual_norm(**({"x": X, "branch": X} | given))


def test_limits_of_the_numbers_are_taken() -> None:
    assert torch.equal(residual_norm(X, X, eps=0, norm="rms")[0], X)
    assert torch.equal(residual_norm(X, X, dropout_p=1)[1], X)


def test_a_setting_is_refused_after_an_equal_one_that_is_valid() -> None:
    """Settings are checked once, and `1.0 == True`."""
    residual_norm(X, X, dropout_p=1.0)
    with pytest.raises(UsageError, match="dropout_p=True"):
        residual_norm(X, X, dropout_p=True)


def test_dtypes_of_the_outputs_by_default() -> None:
    normed, stream = residual_norm(X, X.to(BF16))
    assert (normed.dtype, stream.dtype) == (BF16, F32)
    normed, stream = residual_norm(X.to(BF16), X)
    assert (normed.dtype, stream.dtype) == (F32, BF16)


@pytest.mark.parametrize("dtypes", [(F64, F64, F64), (F32, F64, F32), (F32, F32, F64)])
@pytest.mark.parametrize("backend", [TRITON])
def test_triton_refuses_float64(dtypes: tuple, backend: str) -> None:
    case = Case(dtypes=dtypes)
    with pytest.raises(UsageError, match="float64 is not computed by Triton; pass backend=None"):
        case.call(case.inputs(), backend)


@pytest.mark.parametrize("backend", [TRITON])
def test_triton_refuses_rows_that_do_not_fit(backend: str) -> None:
    case = Case((1, 2**15 + 1))
    with pytest.raises(UsageError, match="rows of 32769 features"):
        case.call(case.inputs(), backend)
    Case((1, 2**15)).call(Case((1, 2**15)).inputs(), backend)


@BACKENDS
@pytest.mark.parametrize("prenorm", [True, False])
def test_strides_do_not_matter(backend: str, prenorm: bool) -> None:
    case = Case((6, 5, 8), prenorm=prenorm, alpha=1.5)
    x, branch, weight, bias = (each.detach() for each in case.inputs())
    grads = cotangents(case)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1), branch.repeat_interleave(2, -1)[..., ::2]]
    strided += [weight.flip(0).flip(0), bias.repeat(2)[:8]]
    other = (grads[0].mT.contiguous().mT, grads[1][:1].expand(6, -1, -1))
    grads = (grads[0], grads[1][:1].expand(6, -1, -1).contiguous())
    plain = results(case, [each.requires_grad_() for each in (x, branch, weight, bias)], backend, grads)
    found = results(case, [each.detach().requires_grad_() for each in strided], backend, other)
    for value, right in zip(found, plain, strict=True):
        torch.testing.assert_close(value, right)


@BACKENDS
def test_a_row_of_one_token_and_an_empty_batch(backend: str) -> None:
    for shape in ((8,), (0, 8), (3, 0, 8)):
        case = Case(shape, dtypes=(BF16, BF16, F32), drop=0.5 if shape != (8,) else 0.0)
        found = results(case, case.inputs(), backend, cotangents(case))
        assert [tuple(each.shape) for each in found] == [shape] * 4 + [(8,)] * 2
        assert [each.dtype for each in found] == [BF16, F32, BF16, BF16, F32, F32]
        assert all(float(each.detach().abs().sum()) == 0 for each in found if shape != (8,))


def test_an_empty_batch_starts_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled for seconds, and a GPU has no launch without programs."""
    monkeypatch.setattr(KERNELS["compile"], "forward", None)
    normed, stream = residual_norm(X[:0], X[:0], backend="compile")
    assert normed.shape == stream.shape == (0, 4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@BACKENDS
def test_dropout(backend: str) -> None:
    x, branch = torch.zeros(200, 50, device=DEVICE), torch.ones(200, 50, device=DEVICE)

    def stream(seed: int | None = None, **more: Any) -> torch.Tensor:
        more = {"dropout_p": 0.3} | more
        source = None if seed is None else torch.Generator(DEVICE).manual_seed(seed)
        return residual_norm(x, branch, generator=source, backend=backend, **more)[1]

    kept = stream(1) != 0
    assert abs(float(kept.float().mean()) - 0.7) < 5 * (0.21 / 10_000) ** 0.5
    torch.testing.assert_close(stream(1)[kept], torch.full_like(branch, 1 / 0.7)[kept])
    assert torch.equal(stream(1), stream(1))
    assert not torch.equal(stream(1), stream(2))
    torch.manual_seed(4)
    first, second = stream(), stream()
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(stream(), first)
    assert abs(float((first != 0).float().mean()) - 0.7) < 5 * (0.21 / 10_000) ** 0.5
    torch.testing.assert_close(first[first != 0], torch.full_like(first, 1 / 0.7)[first != 0])
    assert torch.equal(stream(training=False), branch)
    assert torch.equal(stream(dropout_p=0.0), branch)
    assert torch.equal(stream(dropout_p=1.0), x)
    branch = torch.full_like(branch, float("inf"))
    assert float(stream(1)[~kept].abs().max()) == 0  # with a generator
    # Neighbours are kept independently, in a row and in a column.
    both = [(kept[1:] & kept[:-1]).float().mean(), (kept[:, 1:] & kept[:, :-1]).float().mean()]
    assert all(abs(float(share) - 0.49) < 0.03 for share in both)


@BACKENDS
def test_dropped_branches_are_not_rounded(backend: str) -> None:
    """The factor 1/(1 − p) is applied in float32, with PyTorch's own dropout too."""
    x, branch = torch.zeros(8, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE, dtype=BF16)
    _, stream = residual_norm(x, branch, dropout_p=0.3, backend=backend)
    kept = stream[stream != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.7))


@BACKENDS
def test_normed_and_stream_are_one_tensor_only_after_a_post_norm(backend: str) -> None:
    for case in (Case(), Case(prenorm=False), Case(prenorm=False, dtypes=(F32, BF16, F32))):
        normed, stream = case.call(case.inputs(), backend)
        assert (normed is stream) == (not case.prenorm and case.dtypes[1] == case.dtypes[2])
        assert (normed.dtype, stream.dtype) == case.dtypes[1:]


@pytest.mark.parametrize("backend", [TRITON])
def test_a_changed_stream_is_noticed(backend: str) -> None:
    case = Case()
    normed, stream = case.call(case.inputs(), backend)
    stream.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward()


@pytest.mark.parametrize("backend", [None, TRITON])
def test_a_compiled_model_sees_the_formula(backend: Any) -> None:
    """Without a break of its graph; the compiler fuses the formula with what is around it."""
    case = Case((4, 8), dtypes=(F32, BF16, F32), norm="rms")
    given = case.inputs()
    whole = torch.compile(lambda *tensors: case.call(list(tensors), backend), backend="eager", fullgraph=True)
    for value, right in zip(whole(*given), case.call(given, "eager"), strict=True):
        assert torch.equal(value, right)


def test_modes_that_record_see_the_operations() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    case = Case()
    with Recorder():
        case.call(case.inputs(), "compile")
    assert "aten.native_layer_norm.default" in seen


def test_modes_that_record_functions_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(KERNELS["compile"], "forward", None)
    case = Case()
    given = case.inputs()
    with Recorder():
        case.call(given, "compile")
    assert "layer_norm" in seen


@pytest.mark.usefixtures("no_function_modes")
def test_a_default_device_does_not_switch_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(form: Form, arrays: Any, draw: Any) -> Any:
        return "normed", "stream"

    monkeypatch.setattr(KERNELS["compile"], "forward", forward)
    with torch.device("cpu"):
        assert residual_norm(X, X, backend="compile") == ("normed", "stream")


def test_subclasses_of_tensor_take_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.Tensor):
        pass

    monkeypatch.setattr(KERNELS["compile"], "forward", None)
    normed, _ = residual_norm(torch.ones(2, 4).as_subclass(Mine), torch.ones(2, 4), backend="compile")
    assert type(normed) is Mine


def test_the_choice_on_a_cpu_is_by_dtype_and_size() -> None:
    large, small = torch.empty(COMPILE_FROM // 64, 64), torch.empty(8, 64)

    def chosen(backend: str | None, norm: str, x: torch.Tensor, dtype: torch.dtype, drop: float = 0.0) -> Any:
        form = Form(norm, 1e-5, 1.0, drop, True, dtype, dtype, dtype)  # type: ignore[arg-type]
        return kernel_for(backend, form, (x.to(dtype), x.to(dtype), None, None))

    for norm in ("layer", "rms"):
        for dtype in (F32, BF16):
            assert chosen(None, norm, large, dtype) is None
            assert chosen("any", norm, small, dtype) is None
    assert chosen("any", "layer", large, F32) is None
    assert chosen("any", "rms", large, F32, 0.1) is None
    assert chosen("any", "rms", large, F32) is KERNELS["compile"]
    assert chosen("any", "layer", large, BF16) is KERNELS["compile"]


def test_the_choice_on_a_gpu_is_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernel, "why_not", lambda self, form, arrays: None)
    form = Form("rms", 1e-5, 1.0, 0.0, True, BF16, BF16, BF16)

    def chosen(numbers: int, **options: bool) -> Any:
        x = torch.empty(numbers // 64, 64, dtype=BF16, device="meta")
        return kernel_for(None, form, (x, x, torch.empty(64, device="meta", **options), None))

    assert chosen(TRITON_FROM) is KERNELS["triton"]
    assert chosen(TRITON_FROM - 64) is None
    assert chosen(TRITON_FROM, requires_grad=True) is None
    assert chosen(TRITON_TRAINING_FROM, requires_grad=True) is KERNELS["triton"]
    with torch.no_grad():
        assert chosen(TRITON_FROM, requires_grad=True) is KERNELS["triton"]


def test_without_triton_its_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.kernels.triton_kernel._is_installed", lambda: False)
    with pytest.raises(UsageError, match="the package triton is not installed"):
        residual_norm(X, X, backend="triton")


def test_without_the_interpreter_triton_refuses_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.kernels.triton_kernel._is_installed", lambda: True)
    monkeypatch.setattr("normscope.kernels.triton_kernel._is_interpreted", lambda: False)
    with pytest.raises(UsageError, match="no kernels for device cpu"):
        residual_norm(X, X, backend="triton")


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_autocast_changes_nothing(norm: str) -> None:
    case = Case(dtypes=(F32, BF16, F32), norm=norm)
    given = case.inputs()
    right = case.call(given, "eager")
    with torch.autocast("cpu", BF16):
        found = case.call(given, "eager")
    for value, one in zip(found, right, strict=True):
        assert value.dtype == one.dtype
        torch.testing.assert_close(value, one)


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (F32, BF16, F32), (BF16, F32, BF16), (F32, F32, F32)])
def test_inputs_stay_as_they_are(dtypes: tuple, drop: float) -> None:
    case = Case(dtypes=dtypes, drop=drop)
    leaves = case.inputs()
    for given in (leaves, [each.detach() for each in leaves]):
        before = [each.detach().clone() for each in given]
        case.call(given, "eager")
        assert all(torch.equal(each, old) for each, old in zip(given, before, strict=True))


def test_a_half_precision_branch_may_stay_one_under_vmap() -> None:
    """The sum is made in place in a copy of the branch, which cannot hold a batch."""
    x, branch = torch.randn(3, 5, 8), torch.randn(5, 8).to(BF16)
    normed, stream = torch.vmap(residual_norm, in_dims=(0, None))(x, branch)
    for index, one in enumerate(x):
        right_normed, right_stream = residual_norm(one, branch)
        assert torch.equal(normed[index], right_normed)
        assert torch.equal(stream[index], right_stream)
