"""What `residual_norm` refuses, with what was given, what is expected, and what to do."""

import math
from typing import Any, get_args

import torch
from torch import Tensor

from normscope.errors import UsageError, suggest
from normscope.kernels.form import Arrays, Norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMES = ("x", "branch", "weight", "bias")
_DTYPE_NAMES = "float16, bfloat16, float32 or float64"


def require_arrays(arrays: Arrays) -> None:
    """Raise UsageError unless dtypes, shapes and devices of x, branch, weight and bias fit."""
    for name, tensor in zip(_NAMES, arrays, strict=True):
        optional = name in ("weight", "bias")
        if tensor is None and optional:
            continue
        if not isinstance(tensor, Tensor):
            kinds = "a tensor or None" if optional else "a tensor"
            raise UsageError(f"{name} of type {type(tensor).__name__}", kinds, "pass a tensor")
        if tensor.dtype not in DTYPES:
            raise UsageError(f"{name} of dtype {tensor.dtype}", _DTYPE_NAMES, f"convert {name}")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} of layout {tensor.layout}", "a dense tensor", f"pass {name}.to_dense()")
    x, branch, *gains = arrays
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape != branch.shape:
        raise UsageError(
            f"x of shape {tuple(x.shape)} and branch of shape {tuple(branch.shape)}",
            "one shape (…, D) for both, D at least 1",
            "expand the smaller one; nothing is broadcast here",
        )
    for name, gain in zip(_NAMES[2:], gains, strict=True):
        if gain is not None and gain.shape != x.shape[-1:]:
            raise UsageError(
                f"{name} of shape {tuple(gain.shape)} for features of shape {tuple(x.shape)}",
                f"({x.shape[-1]},)",
                f"pass one {name} a feature, or None",
            )
    devices = {name: str(each.device) for name, each in zip(_NAMES, arrays, strict=True) if each is not None}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UsageError(given, "one device", f"move all of them to {x.device}")


def require_norm(norm: Any) -> None:
    """Raise UsageError unless `norm` is a known one."""
    if norm not in get_args(Norm):
        known = get_args(Norm)
        raise UsageError(
            f"norm={norm!r}",
            " or ".join(f'"{each}"' for each in known),
            suggest(str(norm), known, "choose one"),
        )


def require_numbers(eps: Any, alpha: Any, dropout_p: Any) -> None:
    """Raise UsageError unless ε, α and the dropout probability are numbers in their ranges."""
    if not (_is_number(eps) and eps >= 0):
        raise UsageError(f"eps={eps!r}", "a number of at least 0", "pass for example 1e-5")
    if not _is_number(alpha):
        do = "multiply x by a learnt factor before the call" if isinstance(alpha, Tensor) else "pass a number"
        raise UsageError(f"alpha={alpha!r}", "a finite number, which gets no gradient", do)
    if not (_is_number(dropout_p) and 0 <= dropout_p <= 1):
        raise UsageError(f"dropout_p={dropout_p!r}", "a probability from 0 to 1", "pass for example 0.1")


def require_generator(generator: Any) -> None:
    """Raise UsageError unless the source of randomness is a generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        given = f"generator of type {type(generator).__name__}"
        raise UsageError(given, "a torch.Generator or None", "pass torch.Generator(device).manual_seed(seed)")


def require_dtype(stream_dtype: Any) -> None:
    """Raise UsageError unless the stream's dtype is a floating one."""
    if stream_dtype not in DTYPES:
        raise UsageError(
            f"stream_dtype={stream_dtype!r}", f"torch's {_DTYPE_NAMES}", "pass for example torch.float32"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
