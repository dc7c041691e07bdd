"""Follow elements of a parameter, or features of an activation, through views, slices and concatenations.

The ops of a recorded graph are run again on whole numbers that name the elements.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import CASTS, PARTS, VIEWS, op_set

NOWHERE = -1
"""The number of an element that comes from elsewhere."""
_PATCHES = "im2col"
_MOVES = CASTS | VIEWS | PARTS | op_set(f"unfold {_PATCHES}")
_ELEMENTWISE = op_set("add sub rsub mul div neg where masked_fill tanh clamp pow sqrt rsqrt exp sigmoid")
_SHAPED = ("view", "_unsafe_view")
_LARGEST = 2**27  # numbers of one tensor that is followed


def elements(parameter: Value) -> dict[Value, Tensor]:
    """Values made of parameters alone → number of the element of `parameter` in each of their places."""
    numbers = torch.arange(parameter.numel).reshape(parameter.shape)
    return _followed({parameter: numbers}, lambda value: value.is_weight)


def features(output: Value) -> dict[Value, Tensor]:
    """Values that only move the data of `output` → number of its feature (last axis) in each place."""
    numbers = torch.arange(output.shape[-1]).expand(output.shape).contiguous()
    return _followed({output: numbers}, lambda value: value.live)


def data(leaf: Value) -> dict[Value, Tensor]:
    """Values that only move the data of `leaf` → number of its element in each place."""
    numbers = torch.arange(leaf.numel).reshape(leaf.shape)
    return _followed({leaf: numbers}, lambda value: value.live)


def _followed(start: dict[Value, Tensor], belongs: Callable[[Value], bool]) -> dict[Value, Tensor]:
    known, queue = dict(start), list(start)
    while queue:
        for op in queue.pop(0).users:
            outputs = [value for value in op.outputs if value not in known and belongs(value)]
            if not outputs:
                continue
            for value, numbers in zip(op.outputs, _run(op, known), strict=False):
                if value in outputs and numbers is not None and tuple(numbers.shape) == value.shape:
                    known[value] = numbers
                    queue.append(value)
    return known


def _run(op: Op, known: dict[Value, Tensor]) -> list[Tensor | None]:
    """The numbers of an op's outputs; None where they cannot be told."""
    if not op.outputs or max(value.numel for value in op.outputs) > _LARGEST:
        return []
    if op.base in ("alias", "overwrite") and op.virtual:
        return [known.get(op.inputs[0])] if len(op.inputs) == 1 else []
    if op.base in CASTS or op.base in _ELEMENTWISE:
        same = [known[v] for v in op.inputs if v in known and v.shape == op.outputs[0].shape]
        return [same[0]] if same else []
    if op.base not in _MOVES or op.virtual or not op.name.startswith("aten."):
        return []
    if op.base == _PATCHES and any(op.args[3]):  # padding has no number
        return []

    def number(argument: Any) -> Any:
        if not isinstance(argument, Value):
            return argument
        found = known.get(argument)
        numbers = torch.full(argument.shape, NOWHERE) if found is None else found
        return numbers.double() if op.base == _PATCHES else numbers  # it takes no whole numbers

    if any(
        isinstance(v, Value) and not v.floating and v not in known for v in tree_leaves((op.args, op.kwargs))
    ):
        return []  # indices whose values are not recorded
    packet, _, overload = op.name.removeprefix("aten.").partition(".")
    if packet in _SHAPED:  # the numbers of a copy need not lie as its elements do
        packet, overload = "reshape", "default"
    try:
        function = getattr(getattr(torch.ops.aten, packet), overload)
        is_value = lambda leaf: isinstance(leaf, Value)  # noqa: E731
        args, kwargs = tree_map(number, (op.args, op.kwargs), is_leaf=is_value)
        result = function(*args, **kwargs)
    except (RuntimeError, TypeError, AttributeError, IndexError):
        return []
    return [leaf.long() if isinstance(leaf, Tensor) else None for leaf in tree_leaves(result)]
