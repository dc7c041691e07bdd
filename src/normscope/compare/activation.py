"""Name an activation by its values, whatever code computes it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value, comes_from
from normscope.anatomy.ops import SAME, matmul_operands, weight_of
from normscope.anatomy.replay import CannotReplay, Replay
from normscope.compare.formulas import ACTIVATIONS
from normscope.compare.norms import bias_added, bias_of

_TOL = 1e-5
"""Largest error relative to the largest value. Exact and tanh GELU differ by 1e-4 of that on the grid."""
_ENDS = 6.0
"""The grid goes from minus this to this: quick GELU and SiLU differ there, and ReLU6 from ReLU beyond it."""
_WIDER = 8.0


def read_activation(starts: Sequence[Value], end: Value, replay: Replay) -> tuple[str, bool] | None:
    """Name of the activation between the hidden maps and the last one, and whether it is gated.

    Args:
        starts: outputs of the maps, features last: one, or two where the gate has a map of its own.
        end: the tensor that the last map reads, or the norm in front of it.

    None where it is no function of one number, or of one number times another.
    """
    try:
        return replay.once(_read, starts, [end])
    except CannotReplay:
        return None


def _read(starts: Sequence[Value], ends: Sequence[Value], replay: Replay) -> tuple[str, bool] | None:
    (end,), generator = ends, torch.Generator().manual_seed(0)
    inputs = [torch.rand(s.shape, generator=generator, dtype=torch.float64) + 0.5 for s in starts]
    found = _sources(starts, end, inputs, replay)
    if len(found) not in (1, 2):
        return None
    if len(found) == 1:
        return _values(starts, end, found, replay, ones=[]), False
    linear = [i for i in (0, 1) if _is_linear(starts, end, found, i, replay)]
    if not linear:
        return None
    gate = 1 - linear[0]
    return _values(starts, end, [found[gate]], replay, ones=[found[linear[0]]]), True


Place = tuple[int, int]
"""Number of the start, and a feature of it."""


def _sources(starts: Sequence[Value], end: Value, inputs: list[Tensor], replay: Replay) -> list[Place]:
    """The features of the starts that the first feature of the end depends on."""
    given = {s: x.requires_grad_() for s, x in zip(starts, inputs, strict=True)}
    (output,) = replay.run(given, [end])
    first = _rows(output)[0, 0]
    gradients = torch.autograd.grad(first, inputs, allow_unused=True)
    found = []
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            if bool(rows[1:].any()):
                return []  # it mixes tokens
            found += [(number, int(feature)) for feature in rows[0].nonzero()[:, 0]]
    return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _apply(
    starts: Sequence[Value], end: Value, columns: dict[Place, Tensor], replay: Replay
) -> tuple[Tensor, Tensor]:
    """The first feature of the end for every token, with `columns` as features of the starts, else zero."""
    given = {}
    for number, start in enumerate(starts):
        rows = torch.zeros(start.shape, dtype=torch.float64).reshape(-1, start.shape[-1])
        for (which, feature), column in columns.items():
            if which == number:
                rows[:, feature] = column[: len(rows)]
        given[start] = rows
    (output,) = replay.run(given, [end])
    result = _rows(output)[:, 0]
    return result, next(iter(columns.values()))[: len(result)]


def _grid(starts: Sequence[Value]) -> Tensor:
    """Numbers for every token, the whole range also where there are few."""
    tokens = starts[0].numel // starts[0].shape[-1]
    x = torch.linspace(-_ENDS, _ENDS, tokens, dtype=torch.float64) + 0.013
    x[-1] = _WIDER
    return x


def _is_linear(starts: Sequence[Value], end: Value, found: list[Place], which: int, replay: Replay) -> bool:
    """True where the result is proportional to one of the two numbers."""
    grid = _grid(starts)
    other = torch.full_like(grid, 0.7)
    y, x = _apply(starts, end, {found[which]: grid, found[1 - which]: other}, replay)
    slope = (x * y).sum() / (x * x).sum()
    return bool((y - slope * x).abs().max() <= _TOL * y.abs().max()) and bool(y.any())


def _values(
    starts: Sequence[Value], end: Value, found: list[Place], replay: Replay, ones: list[Place]
) -> str:
    grid = _grid(starts)
    columns = dict.fromkeys(found, grid) | dict.fromkeys(ones, torch.ones_like(grid))
    y, x = _apply(starts, end, columns, replay)
    return name_of_values(x, y)


def name_of_values(x: Tensor, y: Tensor) -> str:
    """Name of a function with these values, with a factor in front where there is one."""
    largest = y.abs().max().clamp_min(1e-12)
    for name, function in ACTIVATIONS.items():
        z = function(x)
        factor = (y * z).sum() / (z * z).sum()
        if bool((y - factor * z).abs().max() <= _TOL * largest):
            is_plain = abs(float(factor) - 1) < 1e-4
            return name if is_plain else f"{float(factor):.4g} · {name}"
    at = [int((x - wanted).abs().argmin()) for wanted in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    values = ", ".join(f"f({float(x[i]):.2f}) = {float(y[i]):.3g}" for i in at)
    return f"another function, {values}"


def hidden_maps(
    branch: FoundBranch, roles: dict[Op, tuple[str, ...]]
) -> tuple[list[Value], Value, Op] | None:
    """Outputs of the hidden maps of a feed-forward, the tensor that its last map reads, and that map.

    Of several experts, the first one's. None where the branch has no two maps one after the other.
    """
    downs = [op for op in branch.mixers if "down" in roles.get(op, ())]
    ups = [op for op in branch.mixers if {"up", "gate"} & {*roles.get(op, ())}]
    for down in downs:
        operands = matmul_operands(down)
        weight = weight_of(down)
        read = next((v for v in (operands or down.inputs) if v is not weight and v.live), None)
        if read is None:
            continue
        end = read.behind(SAME)
        if end.norm is not None and end.norm.input in set(branch.region):
            end = end.norm.input
        mine = [biased(op) for op in ups]
        mine = [value for value in mine if comes_from(end, value)]
        if mine:
            rows = mine[-1].numel // mine[-1].shape[-1]  # a router's rows are others than an expert's
            return [each for each in mine if each.numel // each.shape[-1] == rows][-2:], end, down
    return None


def biased(op: Op) -> Value:
    """The output of a map after its bias, with the features last."""
    value, features = op.outputs[0], op.outputs[0].shape[-1:]
    added = bias_added(op)
    if added is not None and added.outputs[0].shape[-1:] == features:
        value = added.outputs[0]
    is_biased = bias_of(op) is not None
    while len(value.users) == 1 and value.users[0].outputs:
        user = value.users[0]
        after = user.outputs[0]
        is_view = user.base in SAME and (is_biased or user.base in {"view", "_unsafe_view"})
        if not is_view or after.shape[-1:] != features:
            break
        value = after
    return value
