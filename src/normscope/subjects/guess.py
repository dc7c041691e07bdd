"""Guesses of the inputs of a bare module, from inspection and trial forwards."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.subjects.assemble import looking
from normscope.subjects.feed import Portions, tensors_in
from normscope.subjects.subject import LABEL_NAMES, Batch, call_model

_LOOKUPS = ("aten.embedding.default", "aten.index.Tensor", "aten.index_select.default")
_IMAGE_SIDES = (224, 32, 64, 28, 96, 128, 256, 384)
_MOST_WIDTHS = 6


@dataclass(frozen=True)
class Arguments:
    """Arguments of a forward.

    Attributes:
        required: names of those without a default.
        first: name of the first.
        labels: name of the labels, if nothing else follows the first.
    """

    required: tuple[str, ...]
    first: str
    labels: str | None

    @property
    def num_inputs(self) -> int:
        """Number of inputs to make."""
        return max(1, len(self.required))

    @property
    def masks(self) -> tuple[str, ...]:
        """Names of the required arguments after the first, if all of them are masks."""
        others = self.required[1:]
        return others if all("mask" in name for name in others) else ()


def _wrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, DataParallel and DDP, whose own forwards take any arguments."""
    if isinstance(model, DataParallel | DistributedDataParallel):
        return _wrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return model if inner is None else _wrapped(inner)


def arguments_of(model: nn.Module) -> Arguments:
    """Read the signature of `model.forward`, or of the module that torch's wrappers around it call."""
    try:
        parameters = list(inspect.signature(_wrapped(model).forward).parameters.values())
    except ValueError:  # a scripted module has none
        return Arguments((), "", None)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in parameters if p.kind in kinds]
    required = tuple(p.name for p in named if p.default is p.empty)
    labels = next((p.name for p in named[1:] if p.name in LABEL_NAMES and p.default is None), None)
    return Arguments(required, named[0].name if named else "", labels if len(required) == 1 else None)


def pattern_ids(length: int, device: torch.device) -> Tensor:
    """Ids (2, length) of zeros and ones that differ from all positions and segments."""
    return torch.tensor([0, 1, 1, 0, 1], device=device).repeat(length)[: 2 * length].view(2, length)


def vocabulary_of(model: nn.Module, batch: Batch, ids: Tensor) -> int | None:
    """Rows of the table that a forward on `batch` indexes with `ids`, or None if it indexes none."""
    lookups = _Lookups(ids)
    with looking(model), lookups:
        try:
            call_model(model, batch)
        except Exception:  # the lookup may come before the failure; the real attempt reports the error
            return lookups.rows
    return lookups.rows


class _Lookups(TorchDispatchMode):
    """Mode that records the number of rows of the table indexed with `pattern`."""

    def __init__(self, pattern: Tensor) -> None:
        super().__init__()
        self.pattern = pattern
        self.rows: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.rows is None and str(func) in _LOOKUPS:
            table, indices = args[0], tensors_in(args[1:])
            if table.ndim == 2 and len(indices) == 1 and self._is_pattern(indices[0]):
                self.rows = int(table.shape[0])
        return output

    def _is_pattern(self, indices: Tensor) -> bool:
        if indices.numel() != self.pattern.numel() or indices.dtype not in (torch.int64, torch.int32):
            return False
        given = self.pattern.to(indices.dtype)
        return any(torch.equal(indices.reshape(-1), p.reshape(-1)) for p in (given, given.T))


def float_widths(model: nn.Module) -> list[int]:
    """Candidates for d of inputs (B, T, d): the sizes of norms and linear maps, in the module's order."""
    widths: dict[int, None] = {}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.normalized_shape:
            widths[module.normalized_shape[-1]] = None
        elif isinstance(module, nn.Linear):
            widths[module.in_features] = None
        elif isinstance(module, nn.MultiheadAttention):
            widths[module.embed_dim] = None
    if not widths:  # norms and maps written by hand: the sizes of their weights
        widths = dict.fromkeys(size for p in model.parameters() for size in p.shape)
    return list(widths)[:_MOST_WIDTHS]


def image_shapes(model: nn.Module, portions: Portions) -> list[tuple[int, ...]]:
    """Candidates (B, C, H, W) for a model with a 2-D convolution, the likeliest first; else none."""
    convolution = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if convolution is None:
        return []
    sides = dict.fromkeys([*_declared_sides(model), *_sides_of_positions(model, convolution), *_IMAGE_SIDES])
    return [(portions.batch_size, convolution.in_channels, side, side) for side in sides]


def _declared_sides(model: nn.Module) -> Iterator[int]:
    """`image_size` or `img_size` of a module: 224 or (224, 224)."""
    for module in model.modules():
        for name in ("image_size", "img_size"):
            size = vars(module).get(name)
            size = size[0] if isinstance(size, tuple | list) and size else size
            if isinstance(size, int):
                yield size


def _sides_of_positions(model: nn.Module, patches: nn.Conv2d) -> Iterator[int]:
    """Image sides whose number of patches, with or without a class token, matches the positions (1, N, d)."""
    for parameter in model.parameters():
        if parameter.ndim == 3 and parameter.shape[0] == 1:
            for num_patches in (parameter.shape[1], parameter.shape[1] - 1):
                side = round(num_patches**0.5)
                if side > 1 and side * side == num_patches:
                    yield side * int(patches.stride[0])
