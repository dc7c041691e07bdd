"""The check of a pair on the spot: values and gradients beside those of the model's own modules."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from normscope.fusing.adds import Add
from normscope.fusing.pairs import Pair
from normscope.kernels import residual_norm
from normscope.kernels.ahead import autocast_dtype
from normscope.kernels.dispatch import Backend
from normscope.subjects import untouched
from normscope.subjects.rng import generators_kept

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference as a share of the largest entry; norms that round between their steps stay within it."""
Outputs = tuple[Tensor, Tensor]
"""normed and stream."""
Situation = tuple[object, ...]
"""Situation that a check holds for: dtypes, autocast, and the norm's own settings (ε, train or eval)."""


def run(pair: Pair, norm: nn.Module, add: Add, dtype: torch.dtype, backend: Backend | None) -> Outputs:
    """normed, in `dtype`, and the stream, of a pair in one operation."""
    weight, bias = pair.gains(norm)
    if weight is not None and pair.offset:  # in half precision 1 + weight would lose a small weight
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + pair.offset
    return residual_norm(
        add.skip,
        add.branch.to(dtype),
        weight=weight,
        bias=bias,
        eps=pair.eps,
        norm=pair.kind,
        alpha=add.alpha,
        stream_dtype=torch.promote_types(add.skip.dtype, add.branch.dtype),
        backend=backend,
    )


def situation(pair: Pair, norm: nn.Module, add: Add) -> Situation:
    """The present situation; a model may be cast, trained or changed after it was fused."""
    tensors = (add.skip, add.branch, *pair.gains(norm))
    settings = (value for value in vars(norm).values() if isinstance(value, float | bool))
    return *(None if each is None else each.dtype for each in tensors), autocast_dtype(add.skip), *settings


def checked(
    pair: Pair, norm: nn.Module, add: Add, backend: Backend | None
) -> dict[Situation, torch.dtype] | str:
    """The dtype of normed in training and in evaluation; a reason if the pair cannot be computed together."""
    if "forward" in vars(norm):
        return "its forward is replaced, as hooks of accelerate do"
    if add.skip.is_meta:
        return "it is on the meta device, where there are no numbers to compare"
    found: dict[Situation, torch.dtype] = {}
    with untouched(norm):
        for training in (True, False):
            norm.train(training)
            dtype = same_values(pair, norm, norm, add, backend)
            if isinstance(dtype, str):
                return dtype
            if (why := _other_gradients(pair, norm, add, dtype, backend)) is not None:
                return why
            found[situation(pair, norm, add)] = dtype
    return found


def same_values(
    pair: Pair, norm: nn.Module, own: Callable[[Tensor], Tensor], add: Add, backend: Backend | None
) -> torch.dtype | str:
    """The dtype of normed if the values are those of the model's `own` norm; else a reason."""
    with torch.no_grad(), generators_kept():
        total = add.total()
        normed = own(total)
        if torch.promote_types(normed.dtype, add.branch.dtype) != normed.dtype:
            return f"the normed stream has dtype {normed.dtype}, narrower than the branch's"
        found = run(pair, norm, add, normed.dtype, backend)
    return _difference(("the normed stream", "the stream"), found, (normed, total)) or normed.dtype


def _other_gradients(
    pair: Pair, norm: nn.Module, add: Add, dtype: torch.dtype, backend: Backend | None
) -> str | None:
    """The difference of the gradients for fixed random gradients of the outputs; None if it is rounding."""
    parameters = [parameter for parameter in norm.parameters() if parameter.requires_grad]

    def gradients(outputs: Callable[[Add], Outputs]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            skip, branch = (each.detach().clone().requires_grad_() for each in (add.skip, add.branch))
            values = outputs(Add(skip, branch, add.alpha))
            generator = torch.Generator().manual_seed(0)
            grads = [torch.randn(value.shape, generator=generator).to(value) for value in values]
            return torch.autograd.grad(values, [skip, branch, *parameters], grads)

    def own(add: Add) -> Outputs:
        total = add.total()
        return norm(total), total

    names = ["a gradient of the skip", "a gradient of the branch"]
    names += ["a gradient of the norm"] * len(parameters)
    return _difference(names, gradients(lambda add: run(pair, norm, add, dtype, backend)), gradients(own))


def _difference(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """The first difference beyond rounding, in words."""
    for name, ours, reference in zip(names, found, expected, strict=True):
        if ours.dtype != reference.dtype:
            return f"{name} would have dtype {ours.dtype} instead of {reference.dtype}"
        wide = torch.promote_types(reference.dtype, torch.float32)
        largest = reference.to(wide).abs().max().clamp(min=torch.finfo(wide).tiny)
        error = (ours.to(wide) - reference.to(wide)).abs().max() / largest
        if not error <= TOLERANCE[reference.dtype]:
            return f"{name} would differ by {float(error):.1g} of its largest entry"
    return None
