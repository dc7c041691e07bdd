"""Helpers for tensors: float32, unit length, and reading and replacing a model's tensors by path."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """x, in float32 if it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x/max(‖x‖, eps) along the last axis."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by path; a shared tensor occurs once, under its first path."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace tensors by path (see `tensors_of`) by `values`, with the values' dtype and device.

    Shared tensors stay shared; a value that requires no gradient makes a parameter that requires none.
    """
    paths = {id(tensor): path for path, tensor in tensors_of(model).items()}
    made: dict[str, Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or (path := paths[id(tensor)]) not in values:
                    continue
                if path not in made:
                    made[path] = values[path]
                    if isinstance(tensor, nn.Parameter):
                        made[path] = nn.Parameter(values[path], values[path].requires_grad)
                store[name] = made[path]  # type: ignore[assignment]
