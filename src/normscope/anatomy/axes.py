"""Name what each axis of a tensor counts: sequences of the batch, tokens, or features.

An axis is a list of factors (what, size), so a reshape that merges (B, H) and splits them again loses
nothing. The model's input is (batch, tokens, …, features), an image (batch, features, tokens, tokens). The
output of the first learnt map counts as features, whatever its input was. A learnt map over features gives
features, one over tokens alone gives tokens (MLP-Mixer). A constant matrix keeps what an axis counts.
"""

import math
from collections.abc import Iterable
from typing import Literal

from normscope.anatomy.graph import Axis, Op, Value
from normscope.anatomy.ops import CONVOLUTIONS, MATMULS, VIEWS, matmul_operands, op_set

What = Literal["batch", "token", "feature", "copy"]
_PERMUTING = op_set("permute transpose t T mT")
_REDUCING = op_set(
    "mean sum var std var_mean std_mean amax amin prod any all linalg_vector_norm norm logsumexp max min "
    "argmax argmin median"
)


def name_axes(values: Iterable[Value]) -> None:
    """Fill in `axes` of every value, in the order in which values were computed."""
    for value in values:
        value.axes = _axes_of_leaf(value) if value.op is None else _axes(value.op, value)


def counted(value: Value, axes: Iterable[int]) -> set[str]:
    """Names of what these axes count; axes of one entry count nothing."""
    return {what for axis in axes for what, _ in value.axes[axis]}


def reduced_axes(op: Op) -> list[int]:
    """Axes of its first input that a reduction removes."""
    rank = len(op.source.shape)
    dims = op.arg(2 if op.base in {"linalg_vector_norm", "norm"} else 1, "dim")
    if op.base in {"prod", "max", "min"} and isinstance(dims, Value):
        dims = None
    listed = [dims] if isinstance(dims, int) else dims
    return [d % rank for d in listed] if listed and rank else list(range(rank))


def contracted(op: Op, weight: Value) -> tuple[Value, int] | None:
    """The input of a parameterised matmul and its axis that is summed over; None for anything else."""
    operands = matmul_operands(op)
    if operands is None:
        return None
    first, second = operands
    if second is weight:
        return first, len(first.shape) - 1
    return second, max(len(second.shape) - 2, 0)


def source_axis(op: Op, axis: int) -> int:
    """The axis of a view's input that became `axis` of its output; the last of several."""
    order = permutation(op)
    if order is not None:
        return order[axis]
    before, after = op.source.shape, op.outputs[0].shape
    marked = _reshaped([((str(i), n),) if n > 1 else () for i, n in enumerate(before)], after)
    return int(marked[axis][-1][0]) if marked is not None and marked[axis] else min(axis, len(before) - 1)


def permutation(op: Op) -> list[int] | None:
    """Input axis of each output axis of a permutation; None for any other op."""
    rank = len(op.source.shape)
    if op.base not in _PERMUTING:
        return None
    if op.base == "permute":
        return [d % rank for d in op.args[1]]
    order = list(range(rank))
    if rank > 1:
        a, b = (d % rank for d in op.args[1:3]) if op.base == "transpose" else (rank - 2, rank - 1)
        order[a], order[b] = b, a
    return order


def _axes_of_leaf(value: Value) -> tuple[Axis, ...]:
    rank = len(value.shape)
    if value.live and rank > 3:
        whats: list[What] = ["batch", "feature", *["token"] * (rank - 2)]  # type: ignore[list-item]
    else:
        whats = ["token"] * rank
        if rank and value.floating:
            whats[-1] = "feature"
        if value.live and rank > 1:
            whats[0] = "batch"
    return _sized(whats, value.shape)


def _sized(whats: Iterable[str], shape: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple(_axis(what, n) for what, n in zip(whats, shape, strict=True))


def _axis(what: str, n: int) -> Axis:
    return ((what, n),) if n > 1 else ()


def _resized(axis: Axis, n: int) -> Axis:
    """The axis with `n` entries, of the kind that it counts first."""
    return axis if math.prod(size for _, size in axis) == n else _axis(axis[0][0] if axis else "copy", n)


def _axes(op: Op, out: Value) -> tuple[Axis, ...]:
    shape, found = out.shape, None
    if op.inputs:
        source = op.source
        if (order := permutation(op)) is not None:
            found = [source.axes[i] for i in order]
        elif op.base in VIEWS:
            found = _reshaped(source.axes, shape)
        elif op.base == "view_as_complex":
            found = list(source.axes[:-1])
        elif op.base == "view_as_real":
            found = [*source.axes, _axis("feature", 2)]
        elif _is_lookup(op, shape):
            found = [*op.inputs[1].axes, _axis("feature", shape[-1])]
        elif op.base in CONVOLUTIONS:
            found = list(_sized(["batch", "feature", *["token"] * len(shape)][: len(shape)], shape))
        elif op.base in MATMULS:
            found = _product(op, shape)
        elif op.base in _REDUCING and len(shape) < len(source.shape):
            gone = reduced_axes(op)
            found = [axis for i, axis in enumerate(source.axes) if i not in gone]
        elif op.base in {"select", "unbind"} and len(shape) == len(source.shape) - 1:
            gone = [op.arg(1, "dim", 0) % len(source.shape)]
            found = [axis for i, axis in enumerate(source.axes) if i not in gone]
        elif op.base == "gather":
            found = [_resized(axis, n) for axis, n in zip(source.axes, shape, strict=True)]
        elif op.base == "im2col":  # patches of an image
            found = list(_sized(["batch", "feature", "token"][3 - len(shape) :], shape))
        elif op.base == "unfold" and len(shape) == len(source.shape) + 1:
            dim = op.arg(1, "dimension", 0) % len(source.shape)
            windows = [_resized(axis, n) for axis, n in zip(source.axes, shape[:-1], strict=True)]
            found = [
                *windows[:dim],
                _axis("token", shape[dim]),
                *windows[dim + 1 :],
                _axis("feature", shape[-1]),
            ]
        elif op.base == "stack":
            dim = op.arg(1, "dim", 0) % len(shape)
            found = [*source.axes[:dim], _axis("copy", shape[dim]), *source.axes[dim:]]
    if found is None or [math.prod(n for _, n in axis) for axis in found] != list(shape):
        found = [_broadcast(op, out, i - len(shape)) for i in range(len(shape))]
    return tuple(found)


def _is_lookup(op: Op, shape: tuple[int, ...]) -> bool:
    """True for rows of a table at ids: an embedding, or table[ids]."""
    if len(op.inputs) < 2 or op.base not in {"embedding", "index"}:
        return False
    table, ids = op.inputs[:2]
    return op.base == "embedding" or (len(table.shape) == 2 and (*ids.shape, table.shape[1]) == shape)


def _reshaped(axes: Iterable[Axis], shape: tuple[int, ...]) -> list[Axis] | None:
    """The factors of `axes`, in order, distributed to the sizes of `shape`; None where they do not fit."""
    factors = [factor for axis in axes for factor in axis][::-1]
    found: list[Axis] = []
    for n in shape:
        axis: list[tuple[str, int]] = []
        while n > 1 and factors:
            what, size = factors.pop()
            if size > n and size % n == 0:
                factors.append((what, size // n))
                size = n
            if n % size:
                return None
            axis.append((what, size))
            n //= size
        found.append(tuple(axis))
    return found


def _product(op: Op, shape: tuple[int, ...]) -> list[Axis] | None:
    operands = matmul_operands(op)
    if operands is None:
        return None
    a, b = operands
    if op.base == "linear":
        rows, column = list(a.axes[:-1]), b.axes[0]
    else:
        rows = list(a.axes) if len(b.shape) == 1 else list(a.axes[:-1])
        rows, column = (rows[:-1], ()) if len(b.shape) == 1 else (rows, b.axes[-1])
    if b.is_weight and len(b.shape) > 1:
        return [*_tokens_if_first(a, rows), _made(a, len(a.shape) - 1, shape[-1])]
    if a.is_weight and b.live and len(b.shape) > 1 and len(shape) > 1:
        (column,) = _tokens_if_first(b, [column])
        return [*rows[:-1], _made(b, len(b.shape) - 2, shape[-2]), column]
    if a.live and not b.live and len(b.shape) > 1:  # a constant matrix, such as a rotation
        return [*rows, _kept(a, len(a.shape) - 1, shape[-1])]
    if b.live and not a.live and len(b.shape) > 1 and len(shape) > 1:
        batch = list(b.axes[:-2]) if len(b.shape) == len(shape) else rows[:-1]
        return [*batch, _kept(b, len(b.shape) - 2, shape[-2]), column]
    return [*rows, column] if len(b.shape) > 1 else rows


def _made(value: Value, axis: int, n: int) -> Axis:
    """The axis that a learnt map makes of an axis."""
    over_tokens = value.learnt and counted(value, [axis]) == {"token"}
    return _axis("token" if over_tokens else "feature", n)


def _kept(value: Value, axis: int, n: int) -> Axis:
    """The axis that a constant matrix makes of an axis: it counts the same."""
    return _resized(value.axes[axis], n)


def _tokens_if_first(value: Value, rows: list[Axis]) -> list[Axis]:
    """The other axes of a learnt map's input: features that the first map keeps become tokens."""
    if value.learnt:
        return rows
    return [tuple(("token" if what == "feature" else what, n) for what, n in axis) for axis in rows]


def _broadcast(op: Op, out: Value, axis: int) -> Axis:
    """An axis of `out`, numbered from the right, by the first input that has it; live inputs come first."""
    n = out.shape[axis]
    have = [v for v in op.inputs if len(v.shape) >= -axis and v.axes[axis]]
    have.sort(key=lambda v: (v.shape[axis] != n, not v.live))
    if n == 1 or not have:
        made = "copy" if op.inputs or axis < -1 else "feature" if out.floating else "token"  # such as ids
        return _axis(made, n)
    found = have[0].axes[axis]
    return found if math.prod(size for _, size in found) == n else _axis(found[0][0], n)
