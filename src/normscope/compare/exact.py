"""Run a model in float64 throughout, also where its own code asks for float32."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normscope.anatomy.arguments import map_arguments

_WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

_TANH = math.sqrt(2 / math.pi)
_CONSTANTS = (_TANH, 3 * 0.044715 * _TANH, math.sqrt(2), math.sqrt(0.5), math.pi)
"""Factors of activations: of GELU by tanh and its derivative, by erf."""
_DIGITS = 2.0**-23
"""Relative rounding of a constant in float32."""


class _WideOps(TorchDispatchMode):
    """Replaces the narrow types that an op is asked for, as by `x.float()` in a norm."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_mm(*args, **(kwargs or {}))
        result = func(*_sharpened(_widened(args)), **_widened(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in _WIDE and not _has_tensor((args, kwargs)):
            return wide(result)  # a new tensor of the default type, which a model's own code may set
        return result


class _WideConstants(TorchFunctionMode):
    """The same for `torch.tensor(…, dtype=torch.float32)`, which is no op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            args, kwargs = _widened(args), _widened(kwargs)
        return func(*args, **kwargs)


def _grouped_mm(
    x: Tensor, y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """The products of the groups of experts' tokens, which PyTorch has in narrow types only.

    Group g ends at `offs[g]` on the axis that the operand of two dimensions shares with the result: the rows
    of x, the columns of y, or, where both have two, the summed axis. Rows after the last group are 0.
    """
    if offs is None:
        return x @ y
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    groups = range(len(ends))
    if x.dim() == y.dim() == 2:
        return torch.stack([x[:, starts[g] : ends[g]] @ y[starts[g] : ends[g]] for g in groups])
    if x.dim() == 2:
        parts, axis, left = [x[starts[g] : ends[g]] @ y[g] for g in groups], 0, len(x) - ends[-1]
    else:
        parts, axis, left = [x[g] @ y[:, starts[g] : ends[g]] for g in groups], 1, y.shape[1] - ends[-1]
    result = torch.cat(parts, axis)
    return nn.functional.pad(result, (0, 0, 0, left) if axis == 0 else (0, left))


def _has_tensor(arguments: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(arguments))


def _widened(arguments: Any) -> Any:
    return map_arguments(torch.dtype, lambda dtype: _WIDE.get(dtype, dtype), arguments)


def _sharpened(arguments: Any) -> Any:
    """Factors that code writes with the digits of float32, as 0.79788456 for √(2/π), in full."""
    return tuple(_sharp(each) if isinstance(each, float) else each for each in arguments)


def _sharp(number: float) -> float:
    return next((exact for exact in _CONSTANTS if abs(number - exact) < _DIGITS * exact), number)


@contextmanager
def exact() -> Iterator[None]:
    """All floating-point results are float64: the default type, casts to narrower types, and constants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _WideConstants(), _WideOps():
            yield
    finally:
        torch.set_default_dtype(before)


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float64 or complex128; whole numbers and booleans stay."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def widen(model: nn.Module) -> nn.Module:
    """Change parameters, buffers and plain tensor attributes of a model to float64, in place."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dtype in _WIDE:
                vars(module)[name] = wide(value.detach())
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in _WIDE:
                parameter.data = wide(parameter.data)
                parameter.grad = None
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in _WIDE:
                module._buffers[name] = wide(buffer)
    return model


def wide_copy(model: nn.Module) -> nn.Module:
    """A copy of a model in float64; the model stays as it is."""
    computed = (
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf  # the old `weight_norm` keeps it between forwards
    )
    return widen(copy.deepcopy(model, {id(value): value.detach().clone() for value in computed}))
