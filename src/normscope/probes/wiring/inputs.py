"""Inputs of a batch by their use, and copies of the batch with other contents.

Shapes: B sequences, T tokens.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.subjects import Batch, Subject
from normscope.subjects.feed import map_tensors, tensors_in
from normscope.subjects.subject import LABEL_NAMES, LOSS_INPUTS, arguments_in

_NO_CONTENT = ("mask", "position", "type", "segment", "length", "cache")
"""Parts of names of inputs that are no content: a change of them changes the meaning of the others."""
_FEW_VALUES = 3


@dataclass(frozen=True)
class Input:
    """One tensor of a batch.

    Attributes:
        name: keyword, or name of the argument in the forward's signature; "" where neither is known.
        tensor: the tensor itself.
        kind: "ids", "floats" (content of the samples), "labels", "mask" or "other".
    """

    name: str
    tensor: Tensor
    kind: str


def inputs_of(subject: Subject) -> list[Input]:
    """The tensors of the fixed batch, in order."""
    arguments, keywords = arguments_in(subject.batch)
    named: list[tuple[str, Any]] = [*zip(_argument_names(subject, len(arguments)), arguments, strict=True)]
    named += keywords.items()
    found = [Input(name, t, _kind(name, t)) for name, value in named for t in tensors_in(value)]
    if isinstance(subject.batch, Mapping):
        found += [Input("", t, "labels") for t in tensors_in(subject.batch.get(LOSS_INPUTS, ()))]
    return found


def _argument_names(subject: Subject, count: int) -> list[str]:
    try:
        parameters = inspect.signature(subject.model.forward).parameters.values()
    except (ValueError, TypeError):  # a scripted module has no signature
        return [""] * count
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    return [*names, *[""] * count][:count]


def _kind(name: str, tensor: Tensor) -> str:
    lowered = name.lower()
    if lowered in LABEL_NAMES or "label" in lowered:
        return "labels"
    if "mask" in lowered or tensor.dtype == torch.bool:
        return "mask"
    if any(part in lowered for part in _NO_CONTENT) or tensor.is_complex() or tensor.ndim < 2:
        return "other"
    if tensor.is_floating_point():
        return "floats"
    return "ids" if tensor.ndim == 2 and tensor.unique().numel() >= _FEW_VALUES else "other"


def with_tensors(batch: Batch, changed: Mapping[int, Tensor]) -> Batch:
    """`batch` with other tensors: id of a tensor → its replacement."""
    replaced: Batch = map_tensors(lambda tensor: changed.get(id(tensor), tensor), batch)
    return replaced


def other_content(tensor: Tensor) -> Tensor:
    """Other content of the same kind: ids become other ids in use, floats are negated and shuffled."""
    if tensor.is_floating_point():
        return -tensor.flip(-1)
    values = tensor.unique()
    if values.numel() == 1:
        return torch.where(tensor > 0, tensor - 1, tensor + 1)
    return values.roll(1)[torch.searchsorted(values, tensor.contiguous())]
