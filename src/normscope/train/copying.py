"""A model to train on that is not the user's."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def working_copy(model: nn.Module, *, in_place: bool = False) -> Iterator[nn.Module]:
    """A deep copy of `model` to train, without gradients; the original where it cannot be copied.

    Where `copy.deepcopy` raises, or with `in_place` (a loss that holds on to the original would never reach a
    copy), the original itself is handed out and its parameters and buffers are written back at the end, also
    after an exception.
    """
    twin = None
    if not in_place:
        with contextlib.suppress(TypeError, RuntimeError, NotImplementedError, AttributeError, ValueError):
            twin = copy.deepcopy(model)  # raises for a lock, a non-leaf tensor, a handle
    if twin is not None:
        twin.zero_grad(set_to_none=True)
        yield twin
        return
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    model.zero_grad(set_to_none=True)
    try:
        yield model
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
