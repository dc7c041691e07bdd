"""Positions inside of an attention: rotary ones, found by the turn of a vector."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normscope.anatomy.axes import counted
from normscope.anatomy.graph import Value, between
from normscope.anatomy.replay import Replay, cuts
from normscope.compare.ways import Way

Facts = dict[str, Any]


def rotary_facts(way: Way, replay: Replay) -> Facts:
    """Layout, base and scaling of rotary positions on the way to an operand; empty without.

    Raises:
        CannotReplay: the way cannot run again.
    """
    width = way.operand.shape[-1]
    found = (replay.once(_turned, [start], [end], width) for start, end in way.segments())
    return next((facts for facts in found if facts), {})


def _turned(starts: Sequence[Value], ends: Sequence[Value], width: int, replay: Replay) -> Facts:
    """Facts of the rotation of one vector at every position; empty where all positions do the same."""
    (start,), (end,) = starts, ends
    heads = [v for v in cuts(start, end) if len(v.shape) > 2 and v.shape[-1] == width]
    if not heads or not between(heads[0], end):
        return {}
    signs = torch.tensor([1.0, -1.3, 1.1]).repeat(width // 3 + 1)[:width].double()
    x = torch.linspace(1.0, 2.0, width, dtype=torch.float64) * signs
    given = x.expand(heads[0].shape).clone()
    (y,) = replay.run({heads[0]: given}, [end])
    (zero,) = replay.run({heads[0]: torch.zeros_like(given)}, [end])
    rows = _by_token(y - zero, end)
    if rows is None or not bool((rows - rows[:1]).abs().max() > 1e-9):
        return {}
    return _rotary(x, rows)


def _by_token(y: Tensor, end: Value) -> Tensor | None:
    """(T, K) of one sequence and one head."""
    tokens = [i for i in range(len(end.shape) - 1) if counted(end, [i]) == {"token"}]
    axis = tokens[-1] if tokens else len(end.shape) - 2
    if axis < 0:
        return None
    return y.movedim(axis, -2).reshape(-1, y.shape[axis], y.shape[-1])[0]


def _rotary(x: Tensor, y: Tensor) -> Facts:
    """Layout, width, base and scaling of a rotation of pairs of features by angles linear in the position.

    The layout is that of the pairs in `x`. Their order in `y` does not matter, as queries and keys share it.
    """
    turning = [int(i) for i in ((y - y[:1]).abs().max(0).values > 1e-9).nonzero()[:, 0]]
    number = len(turning)
    facts: Facts = {"rotary_width": number}
    if number % 2:
        return facts
    for after in _layouts(turning).values():
        z = torch.complex(y[:, after[0]], y[:, after[1]])
        if bool(((z.abs() - z[:1].abs()).abs() > 1e-5 * z[:1].abs()).any()):
            continue
        facts |= _base(z, number)
        for features in (turning, list(range(number)), list(range(len(x) - number, len(x)))):
            for name, before in _layouts(features).items():
                ratio = z[0].abs() / torch.hypot(x[before[0]], x[before[1]])
                if bool((ratio - ratio[0]).abs().max() < 1e-4 * ratio[0]):
                    return facts | {"rotary_layout": name}
    return facts


def _layouts(features: list[int]) -> dict[str, tuple[list[int], list[int]]]:
    """The first and the second features of all pairs, by layout."""
    half = len(features) // 2
    return {
        "halves": (features[:half], features[half:]),
        "neighbours": (features[0::2], features[1::2]),
    }


def _base(z: Tensor, number: int) -> Facts:
    """Base and scaling from the angles per position: base^(−2i/number), else a list of them."""
    angles = (z[1:] / z[:-1]).angle().median(0).values.abs()
    index = torch.arange(len(angles), dtype=torch.float64)
    if len(angles) < 2 or not bool((angles > 0).all()):
        return {}
    log = angles.log()
    slope = (log[-1] - log[0]) / index[-1]
    is_geometric = bool((log - log[0] - slope * index).abs().max() < 1e-4 * (1 + log.abs().max()))
    base = math.exp(-float(slope) * number / 2)
    if is_geometric and abs(float(angles[0]) - 1) < 1e-4:
        return {"rotary_base": _rounded(base), "rotary_scaling": None}
    if is_geometric:
        return {"rotary_base": _rounded(base), "rotary_scaling": f"1/{_rounded(1 / float(angles[0])):g}"}
    some = angles[:: max(1, len(angles) // 4)]
    words = ", ".join(f"{float(angle):.3g}" for angle in some)
    return {"rotary_scaling": f"angles per position {words}"}


def _rounded(number: float) -> float:
    """The number to four digits: the base comes from angles in float32 in some models."""
    return float(f"{number:.4g}")
