"""Context of normscope's own work inside a script, apart from the surroundings of the script."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from normscope.subjects.rng import generators_kept


@contextmanager
def apart(model: nn.Module, autocast: torch.dtype | None) -> Iterator[None]:
    """Context with gradients on, without hooks on the gradients of `model`; the generators are restored.

    Args:
        autocast: dtype of the only autocast in it; None is none.
    """
    with ExitStack() as held:
        held.enter_context(generators_kept())
        held.enter_context(torch.enable_grad())
        held.enter_context(_without_autocast())
        if autocast is not None:
            device = next(model.parameters()).device.type
            held.enter_context(torch.autocast(device, autocast, cache_enabled=False))
        held.enter_context(_without_hooks(model))
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Context as outside of all autocast.

    `torch.autocast(enabled=False)` is one that a model's own autocast lies in: weights that the model casts
    would stay in the cache while they change.
    """
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cuda", "cpu")}
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for device, is_enabled in enabled.items():
            torch.set_autocast_enabled(device, is_enabled)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Context in which the hooks on gradients do not run; some step an optimizer in the backward."""
    hooks = []
    for parameter in model.parameters():
        hooks += [parameter._post_accumulate_grad_hooks, parameter._backward_hooks]
    held = [(each, dict(each)) for each in hooks if each]
    try:
        for each, _ in held:
            each.clear()
        yield
    finally:
        for each, content in held:
            each.update(content)
