"""The formula and its backward through `torch.compile`, each in one piece.

Compiling takes seconds for every new form and dtype, and again for the second shape; then shapes are free.
"""

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from normscope.kernels import formula
from normscope.kernels.form import AllGrads, Arrays, Form, Grads
from normscope.kernels.function import Kept
from normscope.kernels.masks import Masked


class Compiled(Masked):
    """The backend "compile".

    Args:
        compiler: backend of `torch.compile`.
    """

    def __init__(self, compiler: str = "inductor") -> None:
        self.compiler = compiler

    def why_not(self, form: Form, arrays: Arrays) -> str | None:
        """None: it takes every call. If no C++ compiler is found, PyTorch says so."""
        return None

    def forward(self, form: Form, arrays: Arrays, draw: Tensor | None) -> tuple[Tensor, Tensor]:
        """All in one piece."""
        shape = arrays[0].shape
        x, branch, weight, bias = (None if each is None else each.detach() for each in arrays)
        normed, stream = _forward(form, self.compiler)(_rows(x), _rows(branch), weight, bias, _rows(draw))
        return normed.view(shape), stream.view(shape)

    def backward(self, form: Form, kept: Kept, grads: Grads, wanted: tuple[bool, bool]) -> AllGrads:
        """All in one piece; the sum is computed again where it was not kept."""
        shape = next(each.shape for each in grads if each is not None)
        run = _backward(form, wanted, self.compiler)
        tensors = [_rows(each) for each in (kept.s, kept.x, kept.branch, kept.draw, *grads)]
        gains = (None if each is None else each.detach() for each in (kept.weight, kept.bias))
        grad_x, grad_branch, *rest = run(*gains, *tensors)
        return grad_x.view(shape), grad_branch.view(shape), *rest


@cache
def _forward(form: Form, compiler: str) -> Callable[..., Any]:
    def run(
        x_RD: Tensor, branch_RD: Tensor, weight: Tensor | None, bias: Tensor | None, keep_RD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return formula.forward(form, (x_RD, branch_RD, weight, bias), keep_RD)

    return _compile(run, compiler)


@cache
def _backward(form: Form, wanted: tuple[bool, bool], compiler: str) -> Callable[..., Any]:
    def run(
        weight: Tensor | None,
        bias: Tensor | None,
        s_RD: Tensor | None,
        x_RD: Tensor,
        branch_RD: Tensor,
        keep_RD: Tensor | None,
        *grads: Tensor | None,
    ) -> AllGrads:
        s_RD = formula.summed(form, x_RD, branch_RD, keep_RD) if s_RD is None else s_RD
        return formula.backward(form, s_RD, weight, bias, keep_RD, (grads[0], grads[1]), wanted)

    return _compile(run, compiler)


def _compile(run: Any, compiler: str) -> Callable[..., Any]:
    """`run` compiled; it gets code of its own, because the limit of recompilations counts per code object."""
    own = types.FunctionType(
        run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__
    )
    return torch.compile(own, backend=compiler, fullgraph=True)


def _rows(x: Tensor | None) -> Any:
    return None if x is None else x.detach().reshape(-1, x.shape[-1])
