"""Forward kernels of other packages, where they do what is asked and keep the rounding of the contract.

Untested: no GPU was at hand. They run only if a call names them. The backward is that of our Triton kernel,
since theirs reads the rounded stream. Each package is imported at its first call.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from normscope.kernels.form import Arrays, Form
from normscope.kernels.triton_kernel import TritonKernel


class External(TritonKernel):
    """A kernel of another package.

    Args:
        module: the module that holds it.
        limit: the reason why it does not compute a form, beyond what none of them does; None if it does.
        call: its call.
    """

    def __init__(
        self,
        module: str,
        limit: Callable[[Form, Arrays], str | None],
        call: Callable[[Any, Form, Arrays], tuple[Tensor, Tensor]],
    ) -> None:
        self.module, self.limit, self.call = module, limit, call

    def why_not(self, form: Form, arrays: Arrays) -> str | None:
        """A reason if it is not installed, or the call needs what it does not have."""
        package = self.module.partition(".")[0]
        if not _is_installed(package):
            return f"the package {package} is not installed"
        if not form.prenorm or form.alpha != 1 or form.drop or arrays[2] is None:
            return "it has no α, no mask that could be drawn again, no Post-LN, and needs a weight"
        return self.limit(form, arrays) or super().why_not(form, arrays)

    def forward(self, form: Form, arrays: Arrays, draw: Tensor | None) -> tuple[Tensor, Tensor]:
        """Its forward."""
        x, branch, weight, bias = (None if each is None else each.detach().contiguous() for each in arrays)
        assert x is not None
        assert branch is not None
        with torch.no_grad():
            return self.call(import_module(self.module), form, (x, branch, weight, bias))


def _flash(module: Any, form: Form, arrays: Arrays) -> tuple[Tensor, Tensor]:
    x, branch, weight, bias = arrays
    is_rms = form.norm == "rms"
    return module.layer_norm_fn(
        branch, weight, bias, residual=x, eps=form.eps, prenorm=True, is_rms_norm=is_rms
    )


def _flash_limit(form: Form, arrays: Arrays) -> str | None:
    return None if form.stream_dtype == form.x_dtype else "its stream has x's dtype"


def _quack(module: Any, form: Form, arrays: Arrays) -> tuple[Tensor, Tensor]:
    x, branch, weight, bias = arrays
    return module.rmsnorm(
        branch, weight, bias, residual=x, residual_dtype=form.stream_dtype, eps=form.eps, prenorm=True
    )


def _quack_limit(form: Form, arrays: Arrays) -> str | None:
    return None if form.norm == "rms" else "it adds the branch only for RMSNorm"


def _liger(module: Any, form: Form, arrays: Arrays) -> tuple[Tensor, Tensor]:
    x, branch, weight, _ = arrays
    return module.LigerFusedAddRMSNormFunction.apply(branch, x, weight, form.eps, 0.0, "gemma", False)


def _liger_limit(form: Form, arrays: Arrays) -> str | None:
    dtypes = {form.x_dtype, form.branch_dtype, form.stream_dtype}
    if form.norm != "rms" or arrays[3] is not None or dtypes != {torch.float32}:
        return "it adds in the dtype of its inputs, so it needs float32, RMSNorm and no bias"
    return None


EXTERNAL = {
    "flash-attn": External("flash_attn.ops.triton.layer_norm", _flash_limit, _flash),
    "liger": External("liger_kernel.ops.fused_add_rms_norm", _liger_limit, _liger),
    "quack": External("quack.rmsnorm", _quack_limit, _quack),
}
"""Kernels by the name of their backend."""


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
