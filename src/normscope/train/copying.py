"""Copies of the user's model for training."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from normscope.collecting import collection_paused
from normscope.subjects import untouched


@contextlib.contextmanager
def working_copy(model: nn.Module, *, in_place: bool = False) -> Iterator[nn.Module]:
    """Give a deep copy of `model` for training, without gradients.

    If `copy.deepcopy` raises, or with `in_place` (for a loss that holds the original and would never reach a
    copy), the original itself is given, see `untouched`. Its parameters are then restored at the end, also
    after an exception.
    """
    twin = None
    if not in_place:
        refusals = (TypeError, RuntimeError, NotImplementedError, AttributeError, ValueError)
        with contextlib.suppress(*refusals), collection_paused():
            twin = copy.deepcopy(model)  # raises for a lock, a non-leaf tensor, a handle
    if twin is not None:
        twin.zero_grad(set_to_none=True)
        yield twin
        return
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with untouched(model):
            yield model
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
