"""Tests of whether trials can be stacked, with the reason if not."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state

from normscope.errors import describe
from normscope.nn.tensors import tensors_of
from normscope.train.live import LiveOptimizers
from normscope.train.recipe import Recipe
from normscope.train.stack_forward import LossOf, StackedLoss, stack_batches
from normscope.train.stack_optim import STACKED_OPTIMIZERS

_DTYPES = (torch.float32, torch.float64)
_TOLERANCE = 1e-3
"""Relative tolerance for losses and gradients in single precision; errors of vmap are larger."""


def why_not_stackable(model: nn.Module, batch: Any, loss: LossOf, config: Recipe) -> str | None:
    """The reason why trials of such models cannot be stacked; None if they can.

    One backward of a stack of two copies is compared with the single model's, unless it draws random numbers.
    This detects models that branch on values of tensors, or that `vmap` changes. A copy is tried: a first
    forward may set attributes (transformers marks a model whose hooks it has installed), and replicas must
    not differ in them.
    """
    if isinstance(config.optimizer, LiveOptimizers):
        return "live optimizers step one model each"
    if config.optimizer not in STACKED_OPTIMIZERS:
        return f"the optimizer {config.optimizer} steps whole matrices"
    if config.precision != "float32":
        return f"precision {config.precision}: autocast is not stacked"
    other = {str(p.dtype) for p in model.parameters() if p.dtype not in _DTYPES}
    if other:
        return f"weights in {', '.join(sorted(other))}"
    if not any(p.requires_grad for p in model.parameters()):
        return "nothing to train"
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"]
    with torch.random.fork_rng(devices=set(devices)):
        return _tried(copy.deepcopy(model), batch, loss)


def _tried(model: nn.Module, batch: Any, loss: LossOf) -> str | None:
    called = StackedLoss(model, loss)
    parameters, buffers = stack_module_state([model, model])
    try:
        losses = called(parameters, buffers, stack_batches([batch, batch]))
        losses.sum().backward()
    except Exception as error:  # the model's code may raise anything under vmap; report its message
        return f"under torch.vmap: {describe(error)}"
    if all(p.grad is None for p in parameters.values()):
        return "its loss does not reach the weights of the given model"
    gradient = torch.cat([_gradient(p)[0].flatten() for p in parameters.values() if p.requires_grad])
    (loss_alone, gradient_alone), (again, _) = _alone(called, model, batch), _alone(called, model, batch)
    if not torch.equal(loss_alone, again):
        return None  # dropout: nothing to compare
    if _close(losses[0].detach(), loss_alone) and _close(gradient, gradient_alone):
        return None
    return "its loss or gradient differs under torch.vmap"


def _alone(called: StackedLoss, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of all trainable parameters, without vmap and on copies."""
    parameters = {
        name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }
    loss, _ = called.lone(parameters, {name: b.clone() for name, b in model.named_buffers()}, batch)
    loss.backward()
    gradient = torch.cat([_gradient(p).flatten() for p in parameters.values() if p.requires_grad])
    return loss.detach(), gradient


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _close(one: Tensor, other: Tensor) -> bool:
    size = float(torch.linalg.vector_norm(other))
    return not math.isfinite(size) or float(torch.linalg.vector_norm(one - other)) <= _TOLERANCE * size


def unlike(models: Sequence[nn.Module], configs: Sequence[Recipe]) -> str | None:
    """Describe a difference in a property that replicas of a stack must share; None if there is none."""
    for name in ("optimizer", "accumulation", "precision", "beta1", "beta2"):
        values = {getattr(config, name) for config in configs}
        if len(values) > 1:
            return f"{name} is one of {', '.join(sorted(map(str, values)))}"
    if len({id(model) for model in models}) < len(models):
        return "a module is given twice"
    first = _shape(models[0])
    for model in models[1:]:
        other = _shape(model)
        if other.keys() != first.keys():
            return f"{min(first.keys() ^ other.keys())} is not in all"
        for key, value in first.items():
            if not _same(value, other[key]):
                return f"{key} is not the same in all"
    return None


def _shape(model: nn.Module) -> dict[str, Any]:
    """Types, shapes and plain attributes by name, on which a model's code depends besides its values."""
    shape: dict[str, Any] = {}
    for path, module in model.named_modules():
        at = f"{path}." if path else ""
        shape[f"{at}type"] = type(module)
        shape |= {f"{at}{name}": value for name, value in vars(module).items() if _is_plain(value)}
    for name, tensor in tensors_of(model).items():
        shape[name] = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
    return shape


def _is_plain(value: Any) -> bool:
    """True for values that can be compared: numbers, strings, tensors, frozen dataclasses, rows of these."""
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    frozen = dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[union-attr]
    return value is None or frozen or isinstance(value, bool | int | float | str | Tensor)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
