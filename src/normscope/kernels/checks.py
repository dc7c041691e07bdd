"""Checks of the arguments of `residual_norm`.

The calls of a training step repeat: settings are checked once, and tensors by a few comparisons. The reason
is looked for only if one of them fails.
"""

import math
from functools import lru_cache
from typing import Any, get_args

import torch
from torch import Tensor

from normscope.errors import UsageError, suggest
from normscope.kernels.form import Arrays, Form, Norm

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_NAMES = ("x", "branch", "weight", "bias")
_DTYPE_NAMES = "float16, bfloat16, float32 or float64"


def checked_form(*settings: Any) -> Form:
    """The form of settings in the order of its attributes; UsageError if one is invalid."""
    if torch.compiler.is_dynamo_compiling():  # which warns of caches
        return _checked_form.__wrapped__(*settings)
    try:
        return _checked_form(*settings)
    except TypeError:  # something that has no hash, which is no valid setting
        return _checked_form.__wrapped__(*settings)


@lru_cache(maxsize=1024, typed=True)
def _checked_form(
    norm: Any,
    eps: Any,
    alpha: Any,
    dropout_p: Any,
    training: Any,
    prenorm: Any,
    x_dtype: Any,
    branch_dtype: Any,
    stream_dtype: Any,
) -> Form:
    _require_norm(norm)
    _require_numbers(eps, alpha, dropout_p)
    if stream_dtype not in DTYPES:
        given = f"stream_dtype={stream_dtype!r}"
        raise UsageError(given, f"torch's {_DTYPE_NAMES}", "pass for example torch.float32")
    drop = float(dropout_p) if training else 0.0
    return Form(norm, float(eps), float(alpha), drop, bool(prenorm), x_dtype, branch_dtype, stream_dtype)


def require_arrays(arrays: Arrays) -> None:
    """Raise UsageError unless dtypes, shapes and devices of x, branch, weight and bias fit."""
    if not fit(*arrays):
        _say_why(arrays)


def fit(x: Any, branch: Any, weight: Any, bias: Any) -> bool:
    """Whether dtypes, shapes and devices fit."""
    if not (isinstance(x, Tensor) and isinstance(branch, Tensor)):
        return False
    shape, device = x.shape, x.device
    if branch.shape != shape or len(shape) == 0 or shape[-1] == 0:
        return False
    if not (_fits(x, device) and _fits(branch, device)):
        return False
    width = shape[-1:]
    return (weight is None or _is_gain(weight, width, device)) and (
        bias is None or _is_gain(bias, width, device)
    )


def _is_gain(gain: Any, width: torch.Size, device: torch.device) -> bool:
    return isinstance(gain, Tensor) and gain.shape == width and _fits(gain, device)


def _fits(tensor: Tensor, device: torch.device) -> bool:
    return tensor.dtype in DTYPES and tensor.layout is torch.strided and tensor.device == device


def _say_why(arrays: Arrays) -> None:
    """Raise the UsageError for what does not fit."""
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
    given = ", ".join(f"{name} on {device}" for name, device in devices.items())
    raise UsageError(given, "one device", f"move all of them to {x.device}")


def require_generator(generator: Any) -> None:
    """Raise UsageError unless the source of randomness is a generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        given = f"generator of type {type(generator).__name__}"
        raise UsageError(given, "a torch.Generator or None", "pass torch.Generator(device).manual_seed(seed)")


def _require_norm(norm: Any) -> None:
    known = get_args(Norm)
    if norm not in known:
        expected = " or ".join(f'"{each}"' for each in known)
        raise UsageError(f"norm={norm!r}", expected, suggest(str(norm), known, "choose one"))


def _require_numbers(eps: Any, alpha: Any, dropout_p: Any) -> None:
    if not (_is_number(eps) and eps >= 0):
        raise UsageError(f"eps={eps!r}", "a number of at least 0", "pass for example 1e-5")
    if not _is_number(alpha):
        do = "multiply x by a learnt factor before the call" if isinstance(alpha, Tensor) else "pass a number"
        raise UsageError(f"alpha={alpha!r}", "a finite number, which gets no gradient", do)
    if not (_is_number(dropout_p) and 0 <= dropout_p <= 1):
        raise UsageError(f"dropout_p={dropout_p!r}", "a probability from 0 to 1", "pass for example 0.1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
