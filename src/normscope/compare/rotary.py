"""Positions inside of an attention: rotary ones, found by the turn of a vector."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.anatomy.graph import Value, between
from normscope.anatomy.replay import CannotReplay, Replay
from normscope.compare.ways import Way

Facts = dict[str, Any]
_SEEN = 1e-9
"""Relative size above which a number is not rounding in float64."""


def rotary_facts(way: Way, replay: Replay) -> Facts:
    """Layout, base and scaling of rotary positions on the way to an operand, and whether a norm comes after
    them; empty without.

    Raises:
        CannotReplay: the way cannot run again, or it depends on the position in another way.
    """
    for number, (start, end) in enumerate(way.segments()):
        if start is not end and (facts := replay.once(_turned, [start], [end])):
            return facts | {"rotary_before_norm": number < len(way.norms)}
    return {}


def _turned(starts: Sequence[Value], ends: Sequence[Value], replay: Replay) -> Facts:
    """Facts of the rotation of one vector at every position; empty where all positions do the same.

    One head of one sequence gets the same vector at each token. A second run has another factor for each
    token, which shows the token of each row of the result: its axes may stand in any order.
    """
    (start,), (end,) = starts, ends
    if not between(start, end):
        return {}
    head = _Head.behind_last_row(start, end, replay)
    signs = torch.tensor([1.0, -1.3, 1.1]).repeat(head.width // 3 + 1)[: head.width].double()
    x = torch.linspace(1.0, 2.0, head.width, dtype=torch.float64) * signs
    times = 1 + torch.arange(head.tokens, dtype=torch.float64) / head.tokens
    given = [torch.zeros_like(times), torch.ones_like(times), times]
    runs = [replay.run({start: head.filled(each[:, None] * x)}, [end])[0] for each in given]
    zero, one, marked = (run.reshape(-1, end.shape[-1]) for run in runs)
    rows = _by_token(one - zero, marked - zero, times)
    return _rotary(x, rows) if float((rows - rows[:1]).abs().max()) > _SEEN * float(x.abs().max()) else {}


@dataclass(frozen=True)
class _Head:
    """The features of one head at all tokens of one sequence.

    Attributes:
        sizes: the factors of all axes of the tensor, in order.
        order: the same, those of tokens first.
        tokens: number of tokens.
        features: the entries of a token that belong to the head.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    tokens: int
    features: Tensor

    @classmethod
    def behind_last_row(cls, start: Value, end: Value, replay: Replay) -> "_Head":
        """The head in `start` that makes the last row of `end`."""
        factors = [factor for axis in start.axes for factor in axis]
        given = torch.linspace(1.0, 2.0, start.numel, dtype=torch.float64).reshape(start.shape)
        given.requires_grad_()
        (row,) = replay.run({start: given}, [end])
        row = row.reshape(-1, end.shape[-1])[-1]
        weights = torch.linspace(1.0, 1.7, len(row), dtype=torch.float64)
        (slope,) = torch.autograd.grad(row, given, weights)
        sizes = tuple(size for _, size in factors)
        of_tokens = [i for i, (what, _) in enumerate(factors) if what == "token"]
        order = (*of_tokens, *(i for i in range(len(sizes)) if i not in of_tokens))
        tokens = math.prod(sizes[i] for i in of_tokens)
        read = slope.reshape(sizes).permute(order).reshape(tokens, -1).abs()
        read = read > _SEEN * read.max()
        if tokens < 2 or int(read.any(1).sum()) != 1:
            raise CannotReplay("a row that is not made of one token")
        return cls(sizes, order, tokens, read.any(0))

    @property
    def width(self) -> int:
        """Number of the head's features."""
        return int(self.features.sum())

    def filled(self, x: Tensor) -> Tensor:
        """A tensor like `start` that holds x (T, K) at the head, and zeros elsewhere."""
        given = torch.zeros(self.tokens, len(self.features), dtype=x.dtype)
        given[:, self.features] = x
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return given.reshape([self.sizes[i] for i in self.order]).permute(back)


def _by_token(one: Tensor, marked: Tensor, times: Tensor) -> Tensor:
    """The rows (T, K) of all tokens, where `marked` are the same rows with each token's factor."""
    size = one.square().sum(-1)
    kept = size > _SEEN * size.max()
    one, marked = one[kept], marked[kept]
    ratio = (marked * one).sum(-1) / size[kept]
    if float((marked - ratio[:, None] * one).abs().max()) > _SEEN * float(marked.abs().max()):
        raise CannotReplay("a row that is not made of one token")
    gaps = (ratio[None] - times[:, None]).abs()
    if float(gaps.min(1).values.max()) > _SEEN:
        raise CannotReplay("a token without a row")
    return one[gaps.argmin(1)]


def _rotary(x: Tensor, y: Tensor) -> Facts:
    """Layout, width, base and scaling of a rotation of pairs of features by angles linear in the position.

    The layout is that of the pairs in `x`. Their order in `y` does not matter, as queries and keys share it.

    Raises:
        CannotReplay: the length of `y` depends on the position, so that it is no rotation.
    """
    turning = [int(i) for i in ((y - y[:1]).abs().max(0).values > _SEEN).nonzero()[:, 0]]
    number, lengths = len(turning), y.norm(dim=-1)
    if number % 2 or bool(((lengths - lengths[0]).abs() > 1e-5 * lengths[0]).any()):
        raise CannotReplay("a way that depends on the position, and is no rotation")
    facts: Facts = {"rotary_width": number}
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
