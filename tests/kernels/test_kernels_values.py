"""Values and gradients of `residual_norm` against the dense reference in float64, for every backend."""

import itertools

import pytest
import torch
from kernel_laws import (
    BF16,
    DEVICE,
    F16,
    F32,
    F64,
    TRITON,
    Case,
    cotangents,
    names,
    reference,
    results,
    scale_of,
    typical,
    worst,
)

from normscope.kernels import residual_norm

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's compiler
BACKENDS = pytest.mark.parametrize("backend", ["eager", "compile", TRITON])
DTYPES = [
    (F32, F32, F32),
    (BF16, BF16, BF16),
    (F16, F16, F16),
    (F32, BF16, F32),
    (BF16, BF16, F32),
    (F32, F32, BF16),
    (BF16, F16, F16),
]
SHAPES = [(1,), (4, 1), (66_000, 1), (65_537, 3), (2, 3, 31), (3, 1000), (0, 5), (2, 0, 4), (17, 64)]
BY_DTYPE = [
    Case(dtypes=dtypes, norm=norm, prenorm=prenorm, alpha=alpha, drop=drop)
    for dtypes in DTYPES
    for norm, prenorm in itertools.product(("layer", "rms"), (True, False))
    for alpha, drop in ((1.0, 0.0), (1.7, 0.3))
]
BY_SHAPE = [
    Case(shape, dtypes, norm, prenorm=prenorm)
    for shape in SHAPES
    for dtypes in ((F32, F32, F32), (BF16, BF16, BF16))
    for norm, prenorm in (("layer", True), ("rms", False))
]
OTHERS = [
    *(
        Case(gains=gains, norm=norm)
        for gains in ((False, False), (True, False), (False, True))
        for norm in ("layer", "rms")
    ),
    *(Case(dtypes=dtypes, offset=100.0) for dtypes in DTYPES),
    *(Case(alpha=alpha, drop=drop) for alpha, drop in ((0.0, 0.0), (-1.5, 0.0), (1.0, 0.5), (1e4, 0.0))),
    *(
        Case(dtypes=dtypes, alpha=-1.5)
        for dtypes in ((BF16, BF16, BF16), (F32, BF16, F32), (BF16, F32, BF16))
    ),
]
CASES = [*BY_DTYPE, *BY_SHAPE, *OTHERS]
COMPILED = [
    Case((7, 33), (F32, F32, F32), alpha=1.7, drop=0.3),
    Case((7, 33), (BF16, BF16, BF16), "rms"),
    Case((7, 33), (F32, BF16, F32), prenorm=False, offset=100.0),
]


LARGE = [
    Case((300, 96), dtypes, norm, prenorm=prenorm, offset=offset)
    for dtypes in DTYPES
    for norm, prenorm, offset in (
        ("layer", True, 3.0),
        ("layer", False, 0.0),
        ("rms", True, 0.0),
        ("rms", False, 0.0),
    )
]


def require_close(case: Case, backend: str) -> None:
    """Every error is at most twice eager's, or some roundings if that is more: eager may be right by chance.

    Sums over rows get more of them: Triton's interpreter adds the rows of a tile one after the other.
    """
    rows = 1 + case.inputs()[0].numel() // case.shape[-1]  # type: ignore[union-attr]
    inputs, grads = case.inputs(), cotangents(case)
    eager = results(case, inputs, "eager", grads)
    beside = reference(case, inputs, case.mask("eager"), grads)
    exact = reference(case, inputs, case.mask(backend), grads)
    found = results(case, inputs, backend, grads)
    assert [each.dtype for each in found] == [each.dtype for each in eager]
    assert [each.shape for each in found] == [each.shape for each in eager]
    for name, value, right, by_eager, right_of_eager in zip(
        names(case), found, exact, eager, beside, strict=True
    ):
        sums = max(1.0, rows**0.5 / 64) if name in ("gradient of weight", "gradient of bias") else 1.0
        least = torch.finfo(value.dtype).eps / 2 + 2 * torch.finfo(F32).eps * sums
        bound = 2 * max(worst(by_eager, right_of_eager), least * scale_of(right))
        assert worst(value, right) <= bound, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_rounds_once(case: Case) -> None:
    inputs, grads = case.inputs(), cotangents(case)
    exact = reference(case, inputs, case.mask("eager"), grads)
    found = results(case, inputs, "eager", grads)
    width, rows = case.shape[-1], max(1, exact[0].numel() // case.shape[-1])
    conditioning = (1 + abs(case.offset)) * max(1.0, abs(case.alpha))
    wide = 8 * torch.finfo(F32).eps * conditioning * (width**0.5 + 4)
    for name, value, right in zip(names(case), found, exact, strict=True):
        narrow = 0.51 * torch.finfo(value.dtype).eps
        sums = rows**0.5 if name in ("gradient of weight", "gradient of bias") else 1.0
        spread = 32.0 if width == 1 else 1.0  # LayerNorm of one feature is 0/√ε, here with errors over √ε
        assert worst(value, right) <= (narrow + wide * sums * spread) * scale_of(right), name


@pytest.mark.parametrize("backend", [TRITON])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case: Case, backend: str) -> None:
    require_close(case, backend)


@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("backend", [TRITON])
def test_typical_error_is_at_most_twice_that_of_eager(case: Case, backend: str) -> None:
    inputs, grads = case.inputs(), cotangents(case)
    exact = reference(case, inputs, case.mask("eager"), grads)
    found, eager = (results(case, inputs, each, grads) for each in (backend, "eager"))
    for name, value, by_eager, right in zip(names(case), found, eager, exact, strict=True):
        assert typical(value, right) <= 2 * typical(by_eager, right), name


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_error_of_compiled_code_is_at_most_twice_that_of_eager(case: Case) -> None:
    require_close(case, "compile")


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("backend", ["eager"])
def test_float64_is_computed_in_float64(norm: str, prenorm: bool, backend: str) -> None:
    case = Case((4, 9), (F64, F64, F64), norm, prenorm=prenorm, alpha=1.3, drop=0.2)
    inputs, grads = case.inputs(), cotangents(case)
    exact = reference(case, inputs, case.mask(backend), grads)
    for value, right in zip(results(case, inputs, backend, grads), exact, strict=True):
        assert worst(value, right) <= 1e-13


@BACKENDS
def test_the_statistics_are_those_of_the_unrounded_sum(backend: str) -> None:
    """A branch far below the last place of x changes the norm, although the stream rounds it away."""
    x = torch.full((1, 16), 512.0, dtype=BF16, device=DEVICE)
    branch = torch.randn(1, 16, device=DEVICE).to(BF16) / 4
    normed, stream = residual_norm(x, branch, backend=backend)
    assert torch.equal(stream, x)
    right = torch.nn.functional.layer_norm(branch.double(), (16,), eps=1e-5)
    torch.testing.assert_close(normed.double(), right, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@BACKENDS
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_stream_is_rounded_to_nearest_even(backend: str, dtype: torch.dtype) -> None:
    """Halfway cases, values that round up to infinity, and NaN."""
    eps = torch.finfo(dtype).eps
    x = torch.tensor([[1.0, 1 + eps, 1.0, 1 + eps, -1.0, 3e38, float("nan"), 1e-30]], device=DEVICE)
    x[0, -1] = torch.tensor(-1, dtype=torch.int32).view(F32)  # NaN that rounding up makes 0
    branch = torch.tensor([[0.5, 0.5, 0.51, 0.49, -0.51, 1e37, 1.0, 0.0]], device=DEVICE)
    branch = branch * torch.tensor([eps, eps, eps, eps, eps, 4.0, 1.0, 1.0], device=DEVICE)
    _, stream = residual_norm(x, branch, stream_dtype=dtype, backend=backend)
    right = (x + branch).to(dtype)
    assert right[0, 0] == 1
    assert right[0, 1] == 1 + 2 * eps
    assert right[0, 5].isinf()
    torch.testing.assert_close(stream, right, rtol=0, atol=0, equal_nan=True)
