"""Layout of captured tensors: every implementation's axes in one order.

Shapes: B sequences, T tokens, S keys, D features, H heads, K features of a head. Implementations hold the
same tensor as (B, T, D), (B·T, D) or (T, B, D), and heads as (B, H, T, K) or (B·H, T, K).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from normscope.anatomy.graph import Value

_Factor = tuple[int, str, int]  # axis, what it counts, size


@dataclass(frozen=True)
class Layout:
    """A way from a tensor to its common form: split into factors, permute, merge.

    Attributes:
        shape: the tensor's own shape.
        factors: sizes after the split.
        order: permutation of the factors.
        merged: shape of the result.
    """

    shape: tuple[int, ...]
    factors: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]

    def apply(self, tensor: Tensor) -> Tensor:
        """The tensor in the common form; unchanged where it has another shape than the one that was read."""
        if tuple(tensor.shape) != self.shape:
            return tensor
        return tensor.reshape(self.factors).permute(self.order).reshape(self.merged)


def tokens_first(value: Value) -> Layout:
    """(B, T, D) of a tensor of the stream or of a projection."""
    return _layout(value, [_counts("batch"), _counts("token"), _counts("feature", "copy")])


def heads_first(value: Value, head_axis: int) -> Layout:
    """(B, H, T, K) of an operand of an attention, whose axis `head_axis` counts the features of a head."""
    axis = head_axis % len(value.shape)
    inside = _on(axis)
    others = [
        lambda f: f[1] == "batch" and f[0] != axis,
        _others(axis, "feature", "copy"),
        _others(axis, "token"),
    ]
    return _layout(value, [*others, inside])


def pairs_last(value: Value) -> Layout:
    """(B, H, T, S) of an attention's logits or probabilities: the last two axes are queries and keys."""
    rank = len(value.shape)
    if rank < 2:
        return _plain(value)
    tokens = (rank - 2, rank - 1)
    batch = _counts("batch")
    return _layout(
        value,
        [
            lambda f: f[0] not in tokens and batch(f),
            lambda f: f[0] not in tokens and not batch(f),
            _on(rank - 2),
            _on(rank - 1),
        ],
    )


def _counts(*whats: str) -> Callable[[_Factor], bool]:
    return lambda factor: factor[1] in whats


def _on(axis: int) -> Callable[[_Factor], bool]:
    return lambda factor: factor[0] == axis


def _others(axis: int, *whats: str) -> Callable[[_Factor], bool]:
    return lambda factor: factor[0] != axis and factor[1] in whats


def _plain(value: Value) -> Layout:
    return Layout(value.shape, value.shape, tuple(range(len(value.shape))), value.shape)


def _layout(value: Value, groups: list[Callable[[_Factor], bool]]) -> Layout:
    """The factors of all axes, group by group; the plain layout where a factor is in no group."""
    factors = [(axis, what, size) for axis, each in enumerate(value.axes) for what, size in each]
    if math.prod(size for *_, size in factors) != value.numel or not value.axes:
        return _plain(value)
    taken = [[i for i, factor in enumerate(factors) if belongs(factor)] for belongs in groups]
    order = [i for group in taken for i in group]
    if sorted(order) != list(range(len(factors))):
        return _plain(value)
    sizes = tuple(size for *_, size in factors)
    merged = tuple(math.prod(sizes[i] for i in group) for group in taken)
    return Layout(value.shape, sizes or (1,), tuple(order) if sizes else (0,), merged)
