"""Wrong values that a step begins with: in its batch, parameters, buffers and optimizer state."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy.names import named_modules, named_parameters
from normscope.monitor.row import GARBAGE
from normscope.monitor.wrong.types import Range, entries, kind_of, range_of
from normscope.probes.births import is_negative
from normscope.probes.sums import COMPRESSED, extremes, rms
from normscope.recording.calls import named_arguments
from normscope.subjects.feed import tensors_of
from normscope.subjects.subject import POSITIONAL

EXPLODED = 100.0
"""A parameter has exploded if its RMS is this many times the median of its kind."""


@dataclass(frozen=True)
class Held:
    """A tensor that a step begins with, with a wrong value in it.

    Attributes:
        phase: "data", "parameter" or "optimizer state".
        module: path of the module that owns it; "" for data.
        name: its name.
        kind: kind of wrong value.
        range: its range.
        count: number of wrong entries.
        index: index of the first of them.
        others: number of other tensors with wrong values in the same phase.
    """

    phase: str
    module: str
    name: str
    kind: str
    range: Range
    count: int
    index: tuple[int, ...]
    others: int


def wrong_in_data(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Held | None:
    """The first argument with a wrong value that is not a mask's."""
    return first_in("data", [(name, "", t) for name, t in arguments(model, args, kwargs) if not _is_mask(t)])


def wrong_in_model(model: nn.Module) -> Held | None:
    """The first parameter or buffer with a wrong value that is not a mask's."""
    parameters = [(name, owner(name), p) for name, p in named_parameters(model)]
    buffers = [(name, path, b) for name, path, b in named_buffers(model) if not _is_mask(b)]
    return first_in("parameter", parameters + buffers)


def wrong_in_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, of_wrong: bool = False
) -> Held | None:
    """The first learning rate, or tensor of an optimizer's state, with a wrong value.

    Args:
        of_wrong: whether to look only at those of parameters that hold wrong values themselves. A step whose
            gradient is wrong is traced before its update. So what is wrong in both came by the update.
    """
    names = {id(p): name for name, p in named_parameters(model)}
    held = []
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    for number, (optimizer, group) in enumerate(groups):
        parameters = [p for p in group["params"] if not of_wrong or kind_of(p) is not None]
        if parameters and group.get("lr") is not None:
            held.append((f"learning rate of group {number}", "", torch.as_tensor(group["lr"])))
        for parameter in parameters:
            name = names.get(id(parameter), "a parameter outside of the model")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    held.append((f"{key} of {name}", owner(name) if id(parameter) in names else "", value))
    return first_in("optimizer state", held)


def arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a forward, by the arguments' names."""
    for name, value in named_arguments(model, args, kwargs).items():
        tensors = list(tensors_of(value))
        for index, tensor in enumerate(tensors):
            place = f"argument {index}" if name == POSITIONAL else f"{name}[{index}]"
            yield (name if len(tensors) == 1 and name != POSITIONAL else place), tensor


def named_buffers(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Name, owner's path and value of each buffer."""
    for path, module in named_modules(model):
        for own, buffer in module.named_buffers(recurse=False):
            yield (f"{path}.{own}" if path else own), path, buffer


def exploded(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Parameters whose RMS is far above the median of their kind: name → (RMS, median).

    Parameters are of one kind if their modules are of one class, they have one name there, and as many axes.
    """
    modules = dict(named_modules(model))
    kinds: defaultdict[tuple, dict[str, float]] = defaultdict(dict)
    for name, parameter in named_parameters(model):
        path, _, own = name.rpartition(".")
        kinds[type(modules.get(path)), own, parameter.dim()][name] = rms(parameter)
    found = {}
    for sizes in kinds.values():
        for name, size in sizes.items():
            rest = [other for each, other in sizes.items() if each != name]
            middle = statistics.median(rest) if rest else math.nan
            if size > EXPLODED * middle > 0:
                found[name] = (size, middle)
    return found


def owner(name: str) -> str:
    """Path of the module that owns a parameter."""
    return name.rpartition(".")[0]


def _is_mask(tensor: Tensor) -> bool:
    """True where its wrong values are a mask's: all are negative, and nothing else in it is positive."""
    if kind_of(tensor) in (None, "NaN") or not is_negative(tensor, GARBAGE):
        return False
    return float(extremes(tensor)[1]) <= 1  # 1 in a mask that is 1 where a token is seen


def first_in(phase: str, tensors: list[tuple[str, str, Tensor]]) -> Held | None:
    """The first of some tensors, given by name, owner's path and value, with a wrong value."""
    wrong = [(name, module, t, kind) for name, module, t in tensors if (kind := kind_of(t)) is not None]
    if not wrong:
        return None
    name, module, tensor, kind = wrong[0]
    if tensor.layout in COMPRESSED:
        tensor = tensor.to_sparse_coo()
    values = entries(tensor)
    where = ~(values.abs() <= min(GARBAGE, torch.finfo(values.dtype).max))
    index = tuple(int(i) for i in where.nonzero()[0])
    if tensor.is_sparse:
        index = (*tensor._indices()[:, index[0]].tolist(), *index[1:])
    return Held(phase, module, name, kind, range_of(tensor, name), int(where.sum()), index, len(wrong) - 1)
