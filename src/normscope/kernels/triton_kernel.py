"""The backend "triton": launches our kernels. Tested in Triton's interpreter on a CPU; no GPU was at hand."""

import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from normscope.kernels.form import AllGrads, Arrays, Form, Grads
from normscope.kernels.function import Kept

LARGEST_ROW = 2**15
"""Features of a row that a program still holds in registers."""
_DEVICES = ("cuda", "xpu")  # ROCm's name is "cuda" too
_TILE = 2**12
"""Elements of a tile, if a row is shorter."""
_INTERPRETED_PROGRAMS = 5


class TritonKernel:
    """Our Triton kernels, for all calls without float64."""

    def why_not(self, form: Form, arrays: Arrays) -> str | None:
        """A reason if Triton is missing, the device is not its own, or the rows are too long."""
        x = arrays[0]
        if not _is_installed():
            return "the package triton is not installed"
        if not (_is_interpreted() or x.device.type in _DEVICES):
            return f"Triton has no kernels for device {x.device}"
        if torch.float64 in (form.dtype, form.stream_dtype):
            return "float64 is not computed by Triton"
        if x.shape[-1] > LARGEST_ROW:
            return f"rows of {x.shape[-1]} features are longer than {LARGEST_ROW}"
        return None

    def draw(self, form: Form, branch: Tensor, generator: torch.Generator | None) -> Tensor:
        """A seed of Philox on the device, so that nothing waits for it."""
        return torch.randint(2**62, (1,), device=branch.device, generator=generator)

    def mask(self, form: Form, branch: Tensor, draw: Tensor) -> Tensor:
        """The mask of a seed."""
        keep = torch.empty(branch.shape, dtype=torch.bool, device=branch.device)
        block = _tile(keep.numel(), 1)[0]
        _module("forward").mask_kernel[(-(-keep.numel() // block),)](
            draw, keep, keep.numel(), form.drop, BLOCK=block
        )
        return keep

    def forward(self, form: Form, arrays: Arrays, draw: Tensor | None) -> tuple[Tensor, Tensor]:
        """One launch; inputs that are not contiguous are copied first."""
        x, branch, weight, bias = (None if each is None else each.contiguous() for each in arrays)
        assert x is not None
        assert branch is not None
        normed = torch.empty_like(branch)
        stream = None if form.stream_is_normed else torch.empty_like(x, dtype=form.stream_dtype)
        num_rows, width, rows, launch = _layout(form, x)
        with _on(x):
            _module("forward").forward_kernel[(-(-num_rows // rows),)](
                x, branch, weight, bias, draw, normed, stream, num_rows, width, **launch
            )
        return normed, normed if stream is None else stream

    def backward(self, form: Form, kept: Kept, grads: Grads, wanted: tuple[bool, bool]) -> AllGrads:
        """One launch and the sums of the partial sums, which have a fixed order."""
        s, x, branch, weight, grad_normed, grad_stream = (
            None if each is None else each.contiguous()
            for each in (kept.s, kept.x, kept.branch, kept.weight, *grads)
        )
        like = s if x is None else x
        assert like is not None
        is_one = form.alpha == 1 and kept.draw is None and form.x_dtype == form.branch_dtype
        grad_x = torch.empty_like(like, dtype=form.x_dtype)
        grad_branch = None if is_one else torch.empty_like(like, dtype=form.branch_dtype)
        num_rows, width, rows, launch = _layout(form, like)
        num_programs = min(-(-num_rows // rows), _num_programs(like.device))
        parts = [
            torch.empty(num_programs, width, device=like.device) if gain is not None and asked else None
            for gain, asked in zip((kept.weight, kept.bias), wanted, strict=True)
        ]
        with _on(like):
            _module("backward").backward_kernel[(num_programs,)](
                *(s, x, branch, weight, kept.draw, grad_normed, grad_stream, grad_x, grad_branch, *parts),
                *(num_rows, width),
                **launch,
            )
        grad_weight, grad_bias = (
            None if part is None or gain is None else part.sum(0).to(gain.dtype)
            for part, gain in zip(parts, (kept.weight, kept.bias), strict=True)
        )
        return grad_x, grad_x if grad_branch is None else grad_branch, grad_weight, grad_bias


def _layout(form: Form, x: Tensor) -> tuple[int, int, int, dict[str, Any]]:
    """Rows, features, rows of a tile, and what both kernels are launched with."""
    width = x.shape[-1]
    block = 1 << (width - 1).bit_length()
    num_rows = x.numel() // width
    rows, num_warps = _tile(num_rows, block)
    launch = {
        "eps": form.eps,
        "alpha": form.alpha,
        "drop": form.drop,
        "kept_scale": form.kept_scale,
        "IS_LAYER": form.norm == "layer",
        "PRENORM": form.prenorm,
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": num_warps,
    }
    return num_rows, width, rows, launch


def _tile(num_rows: int, block: int) -> tuple[int, int]:
    """Rows of a tile and its warps, of 32 elements a thread until there are 16 of them."""
    rows = min(max(1, _TILE // block), 1 << max(0, num_rows - 1).bit_length())
    return rows, min(16, max(1, rows * block // 1024))


def _num_programs(device: torch.device) -> int:
    """Programs of the backward: two for each multiprocessor."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return _INTERPRETED_PROGRAMS if device.type == "cpu" else 128


def _on(x: Tensor) -> Any:
    """The device of x as the current one, where Triton launches."""
    return (
        torch.get_device_module(x.device).device(x.device) if x.device.type in _DEVICES else torch.no_grad()
    )


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; fixed when they are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _module(name: str) -> Any:
    return importlib.import_module(f"normscope.kernels.triton_{name}")
