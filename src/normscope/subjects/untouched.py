"""`untouched`: restore a model after a block, whatever the block did."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normscope.collecting import collection_paused
from normscope.subjects.rng import generators_kept


@contextmanager
def untouched(model: nn.Module) -> Iterator[nn.Module]:
    """Restore `model` after the block, also on an exception.

    Restored are hooks, `requires_grad`, the train/eval mode of every submodule, buffers, dtype and device,
    `.grad`, plain attributes of every submodule (such as caches of a forward), and the global RNG states.
    Inside, every `.grad` is None, so that nothing adds to the caller's gradients. The *values* of parameters
    are not restored: train on a copy.
    """
    modules = list(model.modules())
    _reshard(modules)
    with collection_paused():
        attributes = [_attributes(module) for module in modules]
        modes = [module.training for module in modules]  # scripted modules keep theirs elsewhere
        parameters = [(p, p.data, p.requires_grad, p.grad) for p in model.parameters()]
        values = [(tensor, tensor.detach().clone()) for tensor in _held_tensors(model, modules)]
    with generators_kept():
        try:
            for parameter, *_ in parameters:
                parameter.grad = None
            yield model
        finally:
            _reshard(modules)
            for module, mode, kept in zip(modules, modes, attributes, strict=True):
                module.training = mode
                _restore_attributes(module, *kept)
            for parameter, data, requires_grad, grad in parameters:
                parameter.grad = None  # the next line refuses a gradient of another dtype
                parameter.data = data
                parameter.requires_grad_(requires_grad)
                parameter.grad = grad
            with torch.no_grad():
                for tensor, value in values:
                    if not _equal(tensor, value):  # a write invalidates graphs that have saved the tensor
                        tensor.detach().copy_(value)


def _reshard(modules: Iterable[nn.Module]) -> None:
    """Free the weights that FSDP gathered for a forward, which would otherwise count as the model's own."""
    for module in modules:
        if hasattr(type(module), "set_reshard_after_forward"):  # an FSDPModule, whose import takes long
            module.reshard()  # type: ignore[operator]


def _equal(tensor: Tensor, value: Tensor) -> bool:
    """Whether both have the same values; False where that cannot be known, as for fake tensors."""
    try:
        return torch.equal(tensor, value)
    except (RuntimeError, NotImplementedError):
        return False


Attributes = tuple[dict[str, Any], dict[str, Any]]
"""Objects by name, and shallow copies of the containers among them that are not empty: most are."""


def _attributes(module: nn.Module) -> Attributes:
    # A module keeps its hooks, buffers, parameters and children in its __dict__.
    held = vars(module).items()
    return dict(held), {k: v.copy() for k, v in held if isinstance(v, dict | list | set) and len(v)}


def _restore_attributes(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    current = vars(module)
    for name in current.keys() - attributes.keys():
        del current[name]
    for name, value in attributes.items():
        current[name] = value
        # Keep the container itself: handles of the user's hooks point to it.
        if isinstance(value, list) and value != contents.get(name, []):
            value[:] = contents.get(name, ())
        elif isinstance(value, dict | set) and (len(value) or name in contents):
            value.clear()
            value.update(contents.get(name, ()))


def _held_tensors(model: nn.Module, modules: Iterable[nn.Module]) -> list[Tensor]:
    """Buffers and tensors that modules hold as plain attributes."""
    plain = [v for m in modules for v in vars(m).values() if isinstance(v, Tensor)]
    return list({id(t): t for t in [*model.buffers(), *plain]}.values())
