"""torchao's rounding as the probe calls it, against plain float64 references, over all formats."""

import importlib
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.probes.quantisation import FORMATS, GRANULARITIES, Rounding, formats_to_round, rounded
from normscope.probes.quantisation.look import sqnr

ROUNDINGS = [Rounding(format, granularity) for format in FORMATS for granularity in GRANULARITIES]
TOP = {"int8": 127, "int4": 7, "fp8": 448}


def scales(x: Tensor, rounding: Rounding, axis: int) -> Tensor:
    """max |x| over the tensor, or over all axes but `axis`, over the largest code; float64, broadcastable."""
    peaks = x.double().abs()
    if rounding.granularity == "channel":
        axes = [a for a in range(x.ndim) if a != axis % x.ndim]
        peaks = peaks.amax(axes, keepdim=True) if axes else peaks
    else:
        peaks = peaks.amax()
    return peaks / TOP[rounding.format]


def float8_grid() -> Tensor:
    """Every magnitude of e4m3fn in order: subnormals k·2⁻⁹, normals (1 + m/8)·2ᵉ up to 448."""
    normals = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return torch.tensor([k * 2.0**-9 for k in range(8)] + normals[:-1], dtype=torch.float64)


def reference(x: Tensor, rounding: Rounding, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The rounded tensor in float64, and which elements lie so near a tie that float32 may decide it."""
    scale = scales(x, rounding, axis)
    ratio = torch.where(scale > 0, x.double() / scale.clamp_min(1e-300), 0.0)
    if rounding.format != "fp8":
        return ratio.round() * scale, (ratio - ratio.floor() - 0.5).abs() < 1e-4
    grid = float8_grid()
    upper = torch.searchsorted(grid, ratio.abs().clamp(max=448.0).contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[upper - 1], grid[upper]
    share = (ratio.abs() - low) / (high - low)
    nearest = torch.where(share < 0.5, low, torch.where(share > 0.5, high, low))
    even = torch.where(share == 0.5, torch.where((upper - 1) % 2 == 0, low, high), nearest)
    return even * ratio.sign() * scale, (share - 0.5).abs() < 1e-4


def tensors() -> Iterator[tuple[str, Tensor, int]]:
    """Name, tensor and axis of its channels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator)
    outlier = x.clone()
    outlier[..., 2] *= 100
    dead = x.clone()
    dead[..., 1] = 0
    yield "normal", x, -1
    yield "outlier channel", outlier, -1
    yield "zero channel", dead, -1
    yield "weight", torch.randn(16, 8, generator=generator), 0
    yield "weight of Conv1D", torch.randn(8, 16, generator=generator), 1
    yield "not contiguous", torch.randn(8, 16, generator=generator).T, 0
    yield "experts", torch.randn(2, 4, 6, 8, generator=generator), 2
    yield "one token", x[:1, :1], -1
    yield "vector", torch.randn(9, generator=generator), -1
    yield "small", 1e-25 * x, -1
    yield "large", 1e30 * x, -1
    yield "float64", x.double(), -1


CASES = [
    pytest.param(rounding, x, axis, id=f"{rounding.name}-{name}")
    for rounding in ROUNDINGS
    for name, x, axis in tensors()
]


@pytest.mark.parametrize(("rounding", "x", "axis"), CASES)
def test_it_is_the_reference(rounding: Rounding, x: Tensor, axis: int) -> None:
    found, (expected, near_tie) = rounded(x, rounding, axis), reference(x, rounding, axis)
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    error = (found.double() - expected).abs() / x.double().abs().max()
    assert error[~near_tie].max() < 1e-6
    assert near_tie.double().mean() < 0.2  # else the line above tests little


@pytest.mark.parametrize(("rounding", "x", "axis"), CASES)
def test_laws(rounding: Rounding, x: Tensor, axis: int) -> None:
    """No error above half a step; odd; idempotent; a factor of 2 goes through."""
    found = rounded(x, rounding, axis)
    step = scales(x, rounding, axis) * (32 if rounding.format == "fp8" else 1)  # of fp8, the step below 448
    assert ((found.double() - x.double()).abs() <= step * (0.5 + 1e-4)).all()
    assert torch.equal(rounded(-x, rounding, axis), -found)
    torch.testing.assert_close(rounded(found, rounding, axis), found, rtol=1e-5, atol=0)
    assert torch.equal(rounded(4 * x, rounding, axis), 4 * found)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_stay_and_a_constant_is_kept(rounding: Rounding, dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 4, dtype=dtype)
    assert torch.equal(rounded(zeros, rounding), zeros)
    constant = torch.full((3, 4), -0.7, dtype=dtype)
    torch.testing.assert_close(rounded(constant, rounding), constant)
    assert sqnr([(zeros, -1)], rounding) is None
    assert rounded(torch.zeros(0, 4), rounding).shape == (0, 4)
    assert torch.equal(rounded(torch.tensor(3.0), rounding), torch.tensor(3.0))


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda each: each.name)
def test_the_sqnr_is_that_of_the_reference(rounding: Rounding) -> None:
    for _, x, axis in tensors():
        noise = (reference(x, rounding, axis)[0] - x.double()).square().sum()
        expected = 10 * math.log10(float(x.double().square().sum() / noise)) if noise else math.inf
        assert sqnr([(x, axis)], rounding) == pytest.approx(expected, abs=0.05) or expected > 120


@pytest.mark.parametrize("format", FORMATS)
def test_a_scale_a_channel_is_not_worse(format: str) -> None:
    """On integers it gains; fp8 has relative steps, so its gain is where a channel would fall below them."""
    slack = 1.0 if format == "fp8" else 0.3
    for name, x, axis in tensors():
        per_tensor, per_channel = (sqnr([(x, axis)], Rounding(format, g)) for g in GRANULARITIES)
        assert per_tensor is not None
        assert per_channel is not None
        assert per_channel >= per_tensor - slack, name
    outlier = next(x for name, x, _ in tensors() if name == "outlier channel")
    others = [c for c in range(8) if c != 2]
    per_tensor, per_channel = (rounded(outlier, Rounding(format, g))[..., others] for g in GRANULARITIES)
    if format == "int4":
        assert not per_tensor.any()  # one channel × 100 leaves no code to the others
        assert per_channel.any()


def test_formats_are_parsed() -> None:
    assert formats_to_round("") == ()
    assert formats_to_round("fp8, int8") == ("int8", "fp8")
    assert formats_to_round(["int4", "int4"]) == ("int4",)
    for given, do in (
        ("int9", 'the nearest name is "int8"'),
        ("float16,int8", "choose one of these"),
        (",", "choose"),
    ):
        with pytest.raises(UsageError, match=do):
            formats_to_round(given)


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ModuleNotFoundError("No module named 'torchao'", name="torchao"), "quantise without torchao"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "ModuleNotFoundError: No module named 'x'"),
        (ImportError("libcuda"), "ImportError: libcuda"),
    ],
)
def test_without_torchao_the_error_says_what_to_install(
    raised: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> None:
        raise raised

    monkeypatch.setattr(importlib, "import_module", fails)
    assert formats_to_round("") == ()
    with pytest.raises(UsageError) as caught:
        formats_to_round("int8")
    assert words in str(caught.value)
    assert str(caught.value).endswith('install it with: pip install "normscope[quantise]".')


def test_a_version_without_the_primitives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    with pytest.raises(UsageError, match=r"expected torchao 0\.15 or newer"):
        formats_to_round("int8")


def test_torchao_is_imported_only_when_asked_for_and_in_silence() -> None:
    code = """
import sys, normscope, normscope.probes.quantisation as q
assert "torchao" not in sys.modules
q.formats_to_round("")
assert "torchao" not in sys.modules
q.formats_to_round("int8")
assert "torchao" in sys.modules
import logging; assert logging.root.manager.disable == 0
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_grid_is_pytorchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.double(), float8_grid())
    assert len(list(itertools.product(FORMATS, GRANULARITIES))) == len(ROUNDINGS)
