"""The choice of a backend for a call, by device, dtype and size.

"eager" is the formula itself. The others are kernels, which compute the same up to the order of sums.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

from normscope.errors import UsageError, suggest
from normscope.kernels.compiled import Compiled
from normscope.kernels.external import EXTERNAL
from normscope.kernels.form import Arrays, Form
from normscope.kernels.function import Kernel
from normscope.kernels.triton_kernel import TritonKernel

Backend = Literal["eager", "compile", "triton", "flash-attn", "liger", "quack", "any"]

_OURS: dict[str, Kernel] = {"compile": Compiled(), "triton": TritonKernel()}
KERNELS: Mapping[str, Kernel] = MappingProxyType(_OURS | EXTERNAL)
"""Kernels by the name of their backend."""
COMPILE_FROM = 2**18
"""Elements of x from which compiled code was faster than eager on a CPU, for RMSNorm and half precision."""

TRITON_FROM, TRITON_TRAINING_FROM = 2**24, 2**26
"""Elements of x from which our Triton kernels were faster than the formula on an H200, without gradients and
with them; below, starting them takes longer than the formula (docs/kernels.md)."""


def kernel_for(backend: str | None, form: Form, arrays: Arrays) -> Kernel | None:
    """The kernel of a call; None for the formula in PyTorch's operations.

    Raises:
        UsageError: the backend is unknown, or cannot compute this call.
    """
    if backend is None and arrays[0].is_cpu:  # first, because most calls are of this kind
        return None
    if torch.compiler.is_compiling():  # the compiler fuses by itself
        return None
    if backend is None or backend == "any":
        return _choose(form, arrays, may_compile=backend == "any")
    if backend == "eager":
        return None
    if backend not in KERNELS:
        known = ("eager", *KERNELS, "any")
        do = suggest(str(backend), known, "choose one, or None")
        raise UsageError(f"backend={backend!r}", f"one of {', '.join(known)}, or None", do)
    if (why := KERNELS[backend].why_not(form, arrays)) is not None:
        raise UsageError(f'backend="{backend}"', f"another one: {why}", "pass backend=None")
    return KERNELS[backend]


def _choose(form: Form, arrays: Arrays, *, may_compile: bool) -> Kernel | None:
    if arrays[0].device.type == "cpu":
        return KERNELS["compile"] if may_compile and _compiling_wins(form, arrays) else None
    trains = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in arrays)
    is_large = arrays[0].numel() >= (TRITON_TRAINING_FROM if trains else TRITON_FROM)
    return KERNELS["triton"] if is_large and KERNELS["triton"].why_not(form, arrays) is None else None


def _compiling_wins(form: Form, arrays: Arrays) -> bool:
    """Whether compiled code was measured to be faster on a CPU (docs/kernels.md)."""
    is_half = form.branch_dtype.itemsize == 2
    return arrays[0].numel() >= COMPILE_FROM and not form.drop and (is_half or form.norm == "rms")
