"""Backends, cases and inputs of the tests of kernels, and a dense reference in float64."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from normscope.kernels import residual_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TRITON = pytest.param("triton", marks=needs_triton)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """A call: shape, dtypes of x, branch and stream, and settings."""

    shape: tuple[int, ...] = (5, 33)
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (F32, F32, F32)
    norm: str = "layer"
    prenorm: bool = True
    alpha: float = 1.0
    drop: float = 0.0
    gains: tuple[bool, bool] = (True, True)
    offset: float = 0.0

    def __str__(self) -> str:
        dtypes = ",".join(str(each).removeprefix("torch.") for each in self.dtypes)
        place = "pre" if self.prenorm else "post"
        shape = "x".join(map(str, self.shape))
        return f"{shape}-{dtypes}-{self.norm}-{place}-α{self.alpha}-p{self.drop}-{self.gains}-{self.offset}"

    def inputs(self) -> list[Tensor | None]:
        """x, branch, weight, bias, as leaves."""
        width = self.shape[-1:]
        x = torch.randn(self.shape) + self.offset
        made = [x.to(self.dtypes[0]), torch.randn(self.shape).to(self.dtypes[1])]
        wide = F64 if F64 in self.dtypes else F32
        gains = [torch.randn(width, dtype=wide) + 1 if wanted else None for wanted in self.gains]
        return [None if each is None else each.to(DEVICE).requires_grad_() for each in (*made, *gains)]

    def call(self, inputs: list[Tensor | None], backend: str | None, seed: int = 3) -> tuple[Tensor, Tensor]:
        """(normed, stream)."""
        x, branch, weight, bias = inputs
        return residual_norm(
            x,
            branch,
            weight=weight,
            bias=bias,
            eps=1e-3,
            norm=self.norm,
            alpha=self.alpha,
            dropout_p=self.drop,
            generator=torch.Generator(DEVICE).manual_seed(seed) if self.drop else None,
            prenorm=self.prenorm,
            stream_dtype=self.dtypes[2],
            backend=backend,
        )

    def mask(self, backend: str | None) -> Tensor:
        """The mask of dropout: the nonzeros of a stream whose branch is 1, and x 0."""
        if not self.drop:
            return torch.ones(self.shape, dtype=torch.bool, device=DEVICE)
        plain = Case(self.shape, self.dtypes, drop=self.drop, gains=(False, False))
        x = torch.zeros(self.shape, dtype=self.dtypes[0], device=DEVICE)
        return plain.call([x, torch.ones_like(x, dtype=self.dtypes[1]), None, None], backend)[1] != 0


def cotangents(case: Case) -> tuple[Tensor, Tensor]:
    """Gradients of normed and stream."""
    return tuple(torch.randn(case.shape).to(dtype).to(DEVICE) for dtype in case.dtypes[1:])  # type: ignore[return-value]


def results(
    case: Case, inputs: list[Tensor | None], backend: str | None, grads: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """normed, stream, and the gradients of the inputs that are not None."""
    outputs = case.call(inputs, backend)
    leaves = [each for each in inputs if each is not None]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def reference(
    case: Case, inputs: list[Tensor | None], keep: Tensor, grads: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """The same in float64, with the dense Jacobian of each row."""
    x, branch, weight, bias = (None if each is None else each.detach().double() for each in inputs)
    assert x is not None
    assert branch is not None
    scale = keep.double() / (1 - case.drop)
    s = case.alpha * x + branch * scale
    width = s.shape[-1]
    mean = s.sum(-1, keepdim=True) / width if case.norm == "layer" else torch.zeros_like(s[..., :1])
    sigma = (((s - mean) ** 2).sum(-1, keepdim=True) / width + 1e-3) ** 0.5
    unit = (s - mean) / sigma
    gain = torch.ones(width, dtype=F64, device=s.device) if weight is None else weight
    normed = unit * gain + (0 if bias is None else bias)
    g_normed, g_stream = (each.double() for each in grads)
    if not case.prenorm:
        # If the dtypes agree, normed and stream are one tensor, whose gradients autograd sums in that dtype.
        g_normed = sum(grads).double() if grads[0].dtype == grads[1].dtype else g_normed + g_stream
        g_stream = torch.zeros_like(g_stream)
    jacobian = torch.eye(width, dtype=F64, device=s.device) - unit[..., :, None] * unit[..., None, :] / width
    if case.norm == "layer":
        jacobian = jacobian - 1 / width
    g_s = torch.einsum("...i,...ij->...j", g_normed * gain, jacobian / sigma[..., None]) + g_stream
    flat = (-1, width)
    g_gains = [(g_normed * unit).reshape(flat).sum(0), g_normed.reshape(flat).sum(0)]
    wanted = [g for g, each in zip(g_gains, (weight, bias), strict=True) if each is not None]
    return [normed, s if case.prenorm else normed, case.alpha * g_s, g_s * scale, *wanted]


def worst(found: Tensor, exact: Tensor) -> float:
    """Largest error; 0 of an empty tensor."""
    return float((found.detach().double() - exact).abs().max()) if exact.numel() else 0.0


def scale_of(exact: Tensor) -> float:
    """Largest value, at least 1 as that of the inputs: a gradient that vanishes is compared absolutely."""
    return max(float(exact.abs().max()), 1.0) if exact.numel() else 1.0


def typical(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the error."""
    return float((found.detach().double() - exact).square().mean().sqrt())


def names(case: Case) -> list[str]:
    """Names of `results`."""
    gains = [name for name, wanted in zip(("weight", "bias"), case.gains, strict=True) if wanted]
    return ["normed", "stream", *(f"gradient of {name}" for name in ("x", "branch", *gains))]
