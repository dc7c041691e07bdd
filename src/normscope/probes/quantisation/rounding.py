"""Fake quantisation: a tensor rounded to a format and back, by torchao's primitives.

    int8, int4  q = clamp(round(x/s), −n, n), n = 127 or 7, s = max |x| / n; the result is s·q
    fp8         s = max |x| / 448, x/s cast to float8_e4m3fn; the result is s times that

The scale s is symmetric and computed from the tensor itself, one for the tensor or one for each channel.
torchao computes in float32; the result has the tensor's dtype.
"""

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.errors import UsageError, describe

LARGEST_CODE = {"int8": 127, "int4": 7}
_TINY = torch.finfo(torch.float32).tiny
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Rounding:
    """A format, and whether a scale belongs to the "tensor" or to a "channel"."""

    format: str
    granularity: str

    @property
    def name(self) -> str:
        """Its name in quantities: "int8-tensor"."""
        return f"{self.format}-{self.granularity}"


def rounded(tensor: Tensor, rounding: Rounding, axis: int = -1) -> Tensor:
    """`tensor`, rounded to the format; `axis` counts the channels.

    A tensor of zeros stays as it is. Values must be finite, also in float32.
    """
    x = tensor.detach().to(torch.float32)
    if x.numel() == 0:
        return tensor.detach()
    moved = x.movedim(axis, 0) if rounding.granularity == "channel" and x.ndim else x.unsqueeze(0)
    rows = moved.reshape(len(moved), -1).contiguous()
    if rows.shape[1] == 1:  # torchao takes one scale for all rows of one value
        rows = rows.repeat(1, 2)
    result = _float8(rows) if rounding.format == "fp8" else _integers(rows, rounding.format)
    result = result[:, : moved[0].numel()].reshape(moved.shape)
    restored = result.movedim(0, axis) if moved.ndim == x.ndim else result.squeeze(0)
    return restored.to(tensor.dtype)


def _integers(rows: Tensor, format: str) -> Tensor:
    """Rows (scales, values of one scale), rounded to symmetric integers."""
    ao, top, block = primitives(), LARGEST_CODE[format], [1, rows.shape[1]]
    mapping = ao.MappingType.SYMMETRIC
    scale, zero = ao.choose_qparams_affine(rows, mapping, block, torch.int8, -top, top, eps=_TINY)
    codes = ao.quantize_affine(rows, block, scale, zero, torch.int8, -top, top)
    return ao.dequantize_affine(codes, block, scale, zero, torch.int8, -top, top)


def _float8(rows: Tensor) -> Tensor:
    """Rows (scales, values of one scale), rounded to e4m3fn."""
    ao = primitives()
    # A lower bound on max |x|: torchao divides by the scale, which is zero for a tensor of zeros.
    scale = ao._choose_scale_float8(rows, [1, rows.shape[1]], hp_value_lb=_TINY * _FP8_MAX)
    return ao._dequantize_affine_float8(ao._quantize_affine_float8(rows, scale), scale)


def primitives() -> Any:
    """torchao's module of primitives; imported only where it is needed.

    Raises:
        UsageError: it is not installed, too old or broken.
    """
    wanted = 'install it with: pip install "normscope[quantise]"'
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of kernels for GPUs that do not load
    try:
        module = importlib.import_module("torchao.quantization.quant_primitives")
        names = ("choose_qparams_affine", "quantize_affine", "dequantize_affine", "MappingType")
        for name in (*names, "_choose_scale_float8", "_quantize_affine_float8", "_dequantize_affine_float8"):
            getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != "torchao":
            raise _unusable(error, wanted) from error
        raise UsageError("quantise without torchao", "torchao 0.15 or newer", wanted) from error
    except Exception as error:  # a library that it links to, another version
        raise _unusable(error, wanted) from error
    finally:
        logging.disable(disabled)
    return module


def _unusable(error: Exception, wanted: str) -> UsageError:
    return UsageError(f"torchao, which cannot be used ({describe(error)})", "torchao 0.15 or newer", wanted)
