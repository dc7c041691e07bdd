"""Causes of a wrong value that an op made out of good inputs, in words of the field.

Each rule takes an `Act` and gives (cause, evidence), or None. The first that applies is the answer.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normscope.probes.births import EMPTIES, FILLS, Act
from normscope.probes.sums import extremes, stored, widened

Cause = tuple[str, str]
"""The cause in a few words, and a clause with its evidence, which may be empty."""

HALVES = (torch.float16, torch.bfloat16)
NORM_WORDS = ("norm", "rms", "standardi")
LOGARITHMS = {"log", "log2", "log10", "log1p"}
EXPONENTIALS = {"exp", "expm1", "exp2", "sinh", "cosh"}
SUMS = {"sub", "rsub", "add"}
AT_ZERO = {"sqrt": "a square root", "sqrt_": "a square root", "pow": "a power", "norm": "a norm"}
AT_ZERO |= {"__pow__": "a power", "log": "a logarithm", "vector_norm": "a norm"}
WRITERS = FILLS | {"index_put", "copy", "_index_put_impl", "ones", "zeros", "scatter", "masked_scatter"}


def cause_of(act: Act, where: str = "") -> Cause | None:
    """The cause of a wrong value of the forward; `where` names the function and the class of its module."""
    for rule in (_uninitialised, _masked_row, _no_targets, _no_variance, _over_nothing, *_SCALAR_RULES):
        if (found := rule(act, where)) is not None:
            return found
    return None


def overflow(act: Act, where: str = "") -> Cause | None:
    """The largest number of the output's dtype is exceeded by a result out of finite inputs."""
    if act.kind != "infinity" or not isinstance(act.output, Tensor):
        return None
    dtype = act.output.dtype
    limit = torch.finfo(dtype).max
    cast = "it casts its input, and " if act.name == "_to_copy" else ""
    return f"overflow of {_short(dtype)}", f"{cast}the largest number of {_short(dtype)} is {limit:.5g}"


def _uninitialised(act: Act, where: str) -> Cause | None:
    if act.name not in EMPTIES:
        return None
    return "uninitialised memory", f"{act.name} leaves whatever the memory held"


def _masked_row(act: Act, where: str) -> Cause | None:
    """A softmax over a row of only -inf, also inside of fused attention, and written out as exp(x − max)."""
    name = act.name.lower()
    if act.kind != "NaN" or not act.tensors:
        return None
    if "softmax" in name:
        dim = next((x for x in act.args[1:] if type(x) is int), -1)
        rows = _masked(act.tensors[0], dim)
    elif "scaled_dot_product" in name or "attention" in name:
        masks = [t for t in act.tensors[3:] if t.dim() >= 2]
        rows = next((found for t in masks if (found := _masked(t, -1)) is not None), None)
    elif name.rstrip("_") == "sub":
        rows = _masked(act.tensors[0], -1)
    else:
        return None
    if rows is None:
        return None
    first = list(map(int, rows.nonzero()[0]))
    return (
        "fully masked row",
        f"{int(rows.sum())} of {rows.numel()} rows are masked throughout, first {first}",
    )


def _masked(tensor: Tensor, dim: int) -> Tensor | None:
    """Rows along `dim` that are -inf, or False, throughout; None if there is none."""
    if not tensor.dim() or not tensor.numel() or tensor.layout != torch.strided:
        return None
    if tensor.dtype == torch.bool:
        rows = ~tensor.any(dim)
    elif tensor.is_floating_point():
        rows = (widened(tensor) == -math.inf).all(dim)
    else:
        return None
    return rows if bool(rows.any()) else None


def _no_targets(act: Act, where: str) -> Cause | None:
    if act.kind != "NaN" or not act.name.startswith("nll_loss"):
        return None
    targets, ignored = act.args[1], act.args[4] if len(act.args) > 4 else -100
    if not bool((targets == ignored).all()):
        return None
    return "every target is ignored", f"all {targets.numel()} targets are {ignored}"


def _no_variance(act: Act, where: str) -> Cause | None:
    """A norm of a constant row, with an ε that is 0 or rounds to 0."""
    name = act.name.rstrip("_")
    is_norm = any(word in (where + name).lower() for word in NORM_WORDS)
    floats = _floats(act)
    if not is_norm or not floats:
        return None
    if name in ("rsqrt", "reciprocal") or (name == "div" and len(floats) > 1):
        zeros = int((floats[-1] == 0).sum())
        if zeros:
            return "zero variance with eps 0", f"the size of {zeros} of {floats[-1].numel()} rows is 0"
        return None
    if "norm" not in name:
        return None
    eps = next((x for x in reversed(act.args) if isinstance(x, float)), None)
    x = floats[0].detach().double()
    axes = _axes(act, x)
    rows = (
        x.square().mean(axes) if "rms" in name else x.var(axes, unbiased=False)
    ) <= 1e-12 * x.square().mean(axes)
    if eps != 0 or not bool(rows.any()):
        return None
    return "zero variance with eps 0", f"{int(rows.sum())} of {rows.numel()} rows are constant"


def _axes(act: Act, x: Tensor) -> tuple[int, ...]:
    """Axes over which a norm op takes its mean."""
    if "batch_norm" in act.name:
        return (0, *range(2, x.dim()))
    shape = next((a for a in act.args[1:] if isinstance(a, list | tuple)), (0,))
    return tuple(range(x.dim() - len(shape), x.dim()))


def _over_nothing(act: Act, where: str) -> Cause | None:
    name = act.name
    if act.kind == "NaN" and act.tensors and name in ("mean", "var", "std", "var_mean", "median"):
        count = act.tensors[0].numel() // max(1, act.output.numel())
        if count <= (0 if name in ("mean", "median") else 1):
            return f"{name} of {'no' if count == 0 else 'one'} value", f"its input has shape {_shape(act)}"
    return None


def _shape(act: Act) -> tuple[int, ...]:
    return tuple(act.tensors[0].shape)


def _division(act: Act, where: str) -> Cause | None:
    name = act.name.rstrip("_")
    if name not in ("div", "reciprocal", "fmod", "remainder") or not act.args:
        return None
    divisor = act.args[0] if name == "reciprocal" else act.args[1]
    if isinstance(divisor, Tensor):
        zeros = int((divisor == 0).sum())
        if zeros:
            return "division by zero", f"{zeros} of {divisor.numel()} divisors are 0"
        smallest = float(widened(divisor).abs().min()) if divisor.numel() else math.nan
        if act.kind != "NaN" and smallest < 1e-6:
            return "division by almost zero", f"the smallest divisor is {smallest:.3g}"
    elif divisor == 0:
        return "division by zero", "the divisor is 0"
    return None


def _logarithm(act: Act, where: str) -> Cause | None:
    if act.name.rstrip("_") not in LOGARITHMS or not act.tensors:
        return None
    low = float(extremes(act.tensors[0])[0]) + (1.0 if "log1p" in act.name else 0.0)
    if low > 0:
        return None
    return ("log of zero" if low == 0 else "log of a negative number"), ""


def _root(act: Act, where: str) -> Cause | None:
    name = act.name.rstrip("_")
    if name not in ("sqrt", "rsqrt") or not act.tensors:
        return None
    low = float(extremes(act.tensors[0])[0])
    if low < 0:
        return "square root of a negative number", ""
    return ("division by the square root of zero", "") if low == 0 and name == "rsqrt" else None


def _power(act: Act, where: str) -> Cause | None:
    if act.name.rstrip("_") != "pow" or not act.tensors:
        return None
    exponent = next((x for x in act.args if isinstance(x, int | float)), None)
    low = float(extremes(act.tensors[0])[0])
    if act.kind == "NaN" and low < 0:
        return "fractional power of a negative number", ""
    if exponent is not None and exponent < 0 and bool((act.tensors[0] == 0).any()):
        return "negative power of zero", ""
    return None


def _exponential(act: Act, where: str) -> Cause | None:
    if act.name.rstrip("_") not in EXPONENTIALS or act.kind != "infinity" or not act.tensors:
        return None
    dtype = act.output.dtype
    limit = math.log(torch.finfo(dtype).max)
    return "overflow of exp", f"exp overflows {_short(dtype)} above {limit:.1f}"


def _difference(act: Act, where: str) -> Cause | None:
    if act.kind != "NaN" or act.name.rstrip("_") not in SUMS:
        return None
    infinite = sum(bool(widened(stored(t)).isinf().any()) for t in act.tensors if t.is_floating_point())
    return ("infinity minus infinity", "") if infinite else None


def _written(act: Act, where: str) -> Cause | None:
    if act.name.rstrip("_") not in WRITERS:
        return None
    return "the value is written by this line", ""


def _growth(act: Act, where: str) -> Cause | None:
    if act.kind != "garbage":
        return None
    sizes = [float(torch.maximum(-low, high)) for t in _floats(act) for low, high in [extremes(t)]]
    factors = [abs(x) for x in act.args if isinstance(x, float)]
    return "growth", f"the largest of its inputs is {max([*sizes, *factors], default=0.0):.3g}"


def _range_of_function(act: Act, where: str) -> Cause | None:
    name = act.name.rstrip("_")
    if act.kind == "NaN" and name in ("acos", "asin", "atanh", "acosh", "lgamma", "erfinv"):
        return f"{name} outside of its domain", ""
    return None


_SCALAR_RULES: tuple[Callable[[Act, str], Cause | None], ...] = (
    _exponential,
    _division,
    _logarithm,
    _root,
    _power,
    _difference,
    _range_of_function,
    _written,
    overflow,
    _growth,
)


def backward_cause(act: Act, function: str) -> Cause | None:
    """The cause of a wrong value that the backward of `function` makes."""
    own = function.rpartition(".")[2]
    if act.output.dtype in HALVES and (found := overflow(act)) is not None:
        return found
    if any(rule(act, "") is not None for rule in (_division, _root, _power)):
        if own in AT_ZERO:
            return f"derivative of {AT_ZERO[own]} at 0", "the derivative there is infinite"
        return f"infinite derivative of {own}", "its backward divides by 0"
    return cause_of(act)


def _floats(act: Act) -> list[Tensor]:
    return [stored(t) for t in act.tensors if t.is_floating_point() and t.numel()]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
