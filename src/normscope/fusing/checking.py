"""The check of a pair on the spot: values and gradients beside those of the model's own modules."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normscope.fusing.adds import Add
from normscope.fusing.finding import Seen
from normscope.fusing.pairs import Pair
from normscope.kernels import residual_norm
from normscope.kernels.dispatch import Backend

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference as a share of the largest entry; norms that round between their steps stay within it."""


def run(pair: Pair, norm: nn.Module, add: Add, backend: Backend | None) -> tuple[Tensor, Tensor]:
    """(normed, stream) of a pair in one operation."""
    weight, bias = pair.gains(norm)
    return residual_norm(
        add.skip,
        add.branch,
        weight=weight + pair.offset if weight is not None and pair.offset else weight,
        bias=bias,
        eps=pair.eps,
        norm=pair.kind,
        alpha=add.alpha,
        stream_dtype=torch.promote_types(add.skip.dtype, add.branch.dtype),
        backend=backend,
    )


def why_not(seen: Seen, norm: nn.Module, backend: Backend | None) -> str | None:
    """Why a pair cannot be fused; None if its values and gradients are those of the model."""

    def theirs(add: Add) -> tuple[Tensor, Tensor]:
        total = torch.add(add.branch, add.skip, alpha=add.alpha)
        return norm(total), total

    parameters = [parameter for parameter in norm.parameters() if parameter.requires_grad]
    expected = _with_gradients(theirs, seen.add, parameters)
    found = _with_gradients(lambda add: run(seen.pair, norm, add, backend), seen.add, parameters)
    words = ("the normed stream", "the stream", "a gradient of the skip", "a gradient of the branch")
    for name, ours, reference in zip(
        (*words, *["a gradient of the norm"] * len(parameters)), found, expected, strict=True
    ):
        if ours.dtype != reference.dtype:
            return f"{name} would have dtype {ours.dtype} instead of {reference.dtype}"
        wide = torch.promote_types(reference.dtype, torch.float32)
        largest = reference.to(wide).abs().max().clamp(min=torch.finfo(wide).tiny)
        error = (ours.to(wide) - reference.to(wide)).abs().max() / largest
        if not error <= TOLERANCE[reference.dtype]:
            return f"{name} would differ by {float(error):.1g} of its largest entry"
    return None


def _with_gradients(
    pair: Callable[[Add], tuple[Tensor, Tensor]], add: Add, parameters: list[nn.Parameter]
) -> list[Tensor]:
    """The outputs of a pair, and the gradients of its inputs for fixed random gradients of the outputs."""
    with torch.enable_grad():
        skip, branch = (each.detach().requires_grad_() for each in (add.skip, add.branch))
        outputs = pair(Add(skip, branch, add.alpha))
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        return [
            *(out.detach() for out in outputs),
            *torch.autograd.grad(outputs, [skip, branch, *parameters], grads),
        ]
