"""Places of tensors in their storage, and the content of a view that others were written over."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Geometry = tuple[Any, ...]
"""Offset, shape, strides and type of a tensor; its shape alone where it has no strides."""


def geometry(tensor: Tensor) -> Geometry:
    """The place of a tensor in its storage."""
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def span(tensor: Tensor) -> range:
    """Bytes of its storage from the first element of a tensor to its last; without strides, all of them."""
    if tensor.layout is not torch.strided:
        return range(2**62)
    first, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
    last = first + (_steps(tensor.shape, tensor.stride()) + 1) * size
    return range(first, last) if tensor.numel() else range(first, first)


def relative(places: Sequence[Geometry]) -> tuple[Geometry, ...]:
    """The places with offsets from the first element of all; unchanged where one has no strides."""
    if any(len(place) == 1 for place in places):
        return tuple(places)
    first = min(place[0] for place in places)
    return tuple((place[0] - first, *place[1:]) for place in places)


def written_over(read: Geometry, held: Sequence[Geometry], tensors: Sequence[Tensor]) -> Tensor:
    """The content of the view `read` after `tensors` were written to the places `held`, in order.

    Raises:
        ValueError: the places are of different kinds of numbers, or have no strides.
    """
    places = (read, *held)
    if any(len(place) == 1 for place in places) or len({place[3].is_complex for place in places}) > 1:
        raise ValueError("views that are not of the same elements")
    size = 1 + max(place[0] + _steps(place[1], place[2]) for place in places)
    storage = torch.zeros(size, dtype=tensors[0].dtype)
    for (offset, shape, stride, _), tensor in zip(held, tensors, strict=True):
        storage.as_strided(shape, stride, offset).copy_(tensor.reshape(shape))
    return storage.as_strided(read[1], read[2], read[0]).clone()


def _steps(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first of a tensor to its last."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
