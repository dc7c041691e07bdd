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

    def undo(self, tensor: Tensor) -> Tensor:
        """The tensor whose common form is `tensor`."""
        permuted = tensor.reshape([self.factors[i] for i in self.order])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return permuted.permute(inverse).reshape(self.shape)


def tokens_first(value: Value) -> Layout:
    """(B, T, D) of a tensor of the stream or of a projection."""
    return _as_it_stands(value, len(value.shape) - 1, 2) or _layout(
        value, [_counts("batch"), _counts("token"), _counts("feature", "copy")]
    )


def heads_first(value: Value, head_axis: int) -> Layout:
    """(B, H, T, K) of an operand of an attention, whose axis `head_axis` counts the features of a head."""
    axis = head_axis % len(value.shape)
    inside = _on(axis)
    others = [
        lambda f: f[1] == "batch" and f[0] != axis,
        _others(axis, "feature", "copy"),
        _others(axis, "token"),
    ]
    return _as_it_stands(value, axis, 1) or _layout(value, [*others, inside])


def pairs_last(value: Value) -> Layout:
    """(B, H, T, S) of an attention's logits or probabilities: the last axis counts keys.

    The one before it counts queries, or sequences and heads as well where they are folded into one.
    """
    rank = len(value.shape)
    if rank < 2:
        return _plain(value)
    batch, is_key = _counts("batch"), _on(rank - 1)
    is_folded = any(what == "batch" for what, _ in value.axes[rank - 2]) if value.axes else False
    is_query = _counts("token") if is_folded else _on(rank - 2)
    return _layout(
        value,
        [
            lambda f: not is_key(f) and not is_query(f) and batch(f),
            lambda f: not is_key(f) and not is_query(f) and not batch(f),
            lambda f: not is_key(f) and is_query(f),
            is_key,
        ],
    )


def _as_it_stands(value: Value, last: int, num_merged: int) -> Layout | None:
    """The layout of a tensor whose axes have the right sizes in the right order, with `last` at the end.

    A view that mixes tokens with heads by mistake has factors of both in one axis. Sorting them would undo
    the mistake, so the sizes decide: B sequences, which come first, and T tokens in one axis, or in the
    first axis together with the sequences (`num_merged` axes of the result are left then).
    """
    axes, shape = value.axes, value.shape
    mixed = any({"token", "feature"} <= {what for what, _ in each} for each in axes)
    if not mixed or not axes or not axes[0] or axes[0][0][0] != "batch":
        return None
    batch = axes[0][0][1]
    tokens = math.prod(size for each in axes for what, size in each if what == "token")
    others = [axis for axis in range(1, len(shape)) if axis != last]
    if num_merged == 2:  # (B, T, D)
        if len(shape) == 2 and shape[0] % batch == 0:
            split = (batch, shape[0] // batch, shape[1])
            return Layout(shape, split, (0, 1, 2), split)
        return _plain(value) if len(shape) == 3 and last == 2 and shape[0] == batch else None
    if len(shape) == 3 and len(others) == 1 and shape[others[0]] == tokens and shape[0] % batch == 0:
        sizes = (batch, shape[0] // batch, shape[1], shape[2])
        order = (0, 1, 2, 3) if last == 2 else (0, 1, 3, 2)
        return Layout(shape, sizes, order, tuple(sizes[i] for i in order))
    if len(shape) == 4 and shape[0] == batch and len(others) == 2 and shape[others[1]] == tokens != shape[1]:
        moved = (0, *others, last)
        return Layout(shape, shape, moved, tuple(shape[i] for i in moved))
    return None


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
