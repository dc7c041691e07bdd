"""A fused kernel as one operation of autograd, with the derivatives that the kernel does not have itself.

The kernel gives values and first derivatives. Where the backward itself is differentiated (`create_graph`,
tangents or a batch in the gradients), it runs the formula in PyTorch's operations instead.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from normscope.kernels import formula
from normscope.kernels.form import AllGrads, Arrays, Form, Grads
from normscope.kernels.plain import is_transformed


class Kernel(Protocol):
    """A backend: values and first derivatives of `formula`."""

    def why_not(self, form: Form, arrays: Arrays) -> str | None:
        """The reason why it cannot compute this call; None if it can."""

    def draw(self, form: Form, branch: Tensor, generator: torch.Generator | None) -> Tensor:
        """The randomness of one call: a mask, or what it is made of."""

    def mask(self, form: Form, branch: Tensor, draw: Tensor) -> Tensor:
        """The mask of a draw, like branch: which features are kept."""

    def forward(self, form: Form, arrays: Arrays, draw: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed, stream)."""

    def backward(self, form: Form, kept: "Kept", grads: Grads, wanted: tuple[bool, bool]) -> AllGrads:
        """All gradients; those of weight and bias where `wanted` says so."""


class Kept:
    """The tensors that a backward needs: the sum, or x and branch to compute it again."""

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        self.s, self.x, self.branch, self.weight, self.bias, self.draw = tensors

    def summed(self, form: Form, mask: Tensor | None) -> Tensor:
        """s."""
        if self.s is not None:
            return self.s
        assert self.x is not None
        assert self.branch is not None
        return formula.summed(form, self.x, self.branch, mask)


class Fused(torch.autograd.Function):
    """(normed, stream) by a kernel; normed alone if the stream is the same tensor."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, form: Form, draw: Tensor | None, *arrays: Tensor | None) -> Any:
        x, branch, weight, bias = arrays
        assert x is not None
        assert branch is not None
        normed, stream = kernel.forward(form, (x, branch, weight, bias), draw)
        sources = (stream, None, None) if form.stream_is_sum else (None, x, branch)
        ctx.save_for_backward(*sources, weight, bias, draw)
        ctx.kernel, ctx.form = kernel, form
        ctx.set_materialize_grads(False)
        return normed if form.stream_is_normed else (normed, stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kernel, form, kept = ctx.kernel, ctx.form, Kept(ctx.saved_tensors)
        both = (grads[0], grads[1] if len(grads) > 1 else None)
        if torch.is_grad_enabled() or is_transformed((*both, *ctx.saved_tensors)):
            mask = None
            if kept.draw is not None:
                like = kept.s if kept.branch is None else kept.branch
                mask = kernel.mask(form, like, kept.draw)
            found = formula.backward(form, kept.summed(form, mask), kept.weight, kept.bias, mask, both)
        else:
            found = kernel.backward(form, kept, both, ctx.needs_input_grad[5:7])
        return (None, None, None, *found)


def fused(kernel: Kernel, form: Form, arrays: Arrays, draw: Tensor | None) -> tuple[Tensor, Tensor]:
    """(normed, stream) of a kernel, with derivatives."""
    if not (torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in arrays)):
        return kernel.forward(form, arrays, draw)
    outputs = Fused.apply(kernel, form, draw, *arrays)
    return (outputs, outputs) if form.stream_is_normed else outputs
