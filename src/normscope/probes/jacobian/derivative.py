"""Check that a Jacobian is its forward's: compare one Jv with central differences, token by token.

The stack's entry is shifted by ±hδ at two steps h. Where the derivative is wrong, the gap between Jv and the
differences does not depend on h; where it is right, the gap is the differences' own error, which shrinks with
h at least as √h (kinks of ReLU). So from the gaps g at a step of 4h and of h,

    (error of the differences at h)² ≤ (g₄ₕ² − gₕ²)/3,        (error of the derivative)² = gₕ² − that

A saturated softmax bends within both steps, and the gap does not shrink. So a derivative that looks wrong is
compared again in a float64 copy at tiny steps (`settled`): there a softmax is smooth, and a rounding under a
straight-through gradient stands still. Where the copy gives no answer, two finer steps must leave the same
gap, as a vector (`same_gap`). Otherwise nothing is judged.

Tokens are compared one by one and the median decides: a router that flips under the shift moves few tokens, a
wrong derivative moves all.
"""

from math import sqrt

import torch
from torch import Tensor

from normscope.linalg import JacobianOperator

STEPS = (2e-3, 5e-4)  # sizes of the shift, relative to the stream's RMS, the long one first
FINER = (1.25e-4, 3.1e-5)  # finer steps, where a wrong derivative must leave the same gap
TINY = (4e-9, 1e-9)  # steps in float64

TOLERANCE = 2e-2
"""Relative error from which a derivative is wrong, as for the first Jv of a function in `normscope.linalg`.
The differences' own error is subtracted before, their rounding is not."""

SAME = 0.5
"""Largest difference of the gaps at two steps, relative to the gap, for a wrong derivative.

Where the derivative is right, the gap is the differences' own error, and the ratio is at least 1 (see above).
"""

Moves = tuple[Tensor, Tensor]  # central differences (x₊ − x₋)/2h at one site, at each of `STEPS`; float64


def compare(
    op: JacobianOperator, source: Moves, target: Moves, size: Tensor, eps: float = 0.0
) -> float | str:
    """Relative error of J at the median token against finite differences, or why it is unknown.

    Costs two products.

    Args:
        op: J, from the tensor at the source to the one at the target.
        source, target: their movement under the shift.
        size: the tensor at the target, whose round-off is that of the differences.
        eps: ε of the coarsest precision in the forward, where it is above the map's own.
    """
    gaps = [_gap(op, dx, dy) for dx, dy in zip(source, target, strict=True)]
    (far, far_moved), (gap, moved) = (
        (_at_median_token(off), _at_median_token(dy)) for off, dy in zip(gaps, target, strict=True)
    )
    pushed = _at_median_token(target[1] + gaps[1])
    round_off = _round_off(op, _at_median_token(size.detach().double()), STEPS[1], eps)
    if far_moved < moved < pushed:
        bends = moved > 1.2 * far_moved
        if bends and gap > TOLERANCE * moved:
            return "the forward bends within the steps of the finite differences"
    scale = max(moved, pushed)
    if round_off > TOLERANCE * scale:
        return "round-off hides the finite differences"
    own = max(0.0, far**2 - gap**2) / 3
    if far > scale / 2 and 2 * own > gap**2 > (TOLERANCE * scale) ** 2:
        # A coarse quantiser jumps rarely: the long step meets a jump, the short one none.
        return "the forward jumps within the steps of the finite differences"
    wrong = max(0.0, sqrt(max(0.0, gap**2 - own)) - round_off)
    return wrong / scale if scale else 0.0


def settled(op: JacobianOperator, source: Moves, target: Moves) -> float | None:
    """Relative error of J at the median token if both steps agree on the gap, as a vector; else None.

    For `TINY` steps in float64, where the differences' own error is below the tolerance, unless the forward
    casts to another precision. Costs two products.
    """
    far, near = (_gap(op, dx, dy) for dx, dy in zip(source, target, strict=True))
    gap, moved = _at_median_token(near), _at_median_token(target[1])
    scale = max(moved, _at_median_token(target[1] + near))
    if _at_median_token(far - near) > SAME * gap + TOLERANCE * scale:
        return None
    return gap / scale if scale else 0.0


def same_gap(
    op: JacobianOperator, ends: tuple[Moves, Moves], finer: tuple[Moves, Moves], size: Tensor, eps: float
) -> bool:
    """Whether the gap between J and the differences stays the same, as a vector, down to the `FINER` steps.

    Costs three products.

    Args:
        op, size, eps: as for `compare`.
        ends, finer: how source and target move, at `STEPS` and at `FINER`.
    """
    (_, dx), (_, dy) = ends
    gap = _gap(op, dx, dy)
    size_of_token = _at_median_token(size.detach().double())
    return all(
        _at_median_token(_gap(op, dx, dy) - gap)
        <= SAME * _at_median_token(gap) + _round_off(op, size_of_token, step, eps)
        for dx, dy, step in zip(*finer, FINER, strict=True)
    )


def is_wrong(error: float | str) -> bool:
    """Whether a derivative with this result of `compare` is not that of its forward."""
    return not isinstance(error, str) and error > TOLERANCE


def _gap(op: JacobianOperator, dx: Tensor, dy: Tensor) -> Tensor:
    """J dx − dy, in the shape of dy; float64."""
    return op.matvec(dx.reshape(-1).to(op.dtype)).double().reshape(dy.shape) - dy


def _round_off(op: JacobianOperator, size: float, step: float, eps: float) -> float:
    """Rounding error of a difference at a step, for a token of length `size`.

    8 units in the last place: both ends of the difference are rounded, and so are the values they come from.
    """
    return 8 * max(eps, torch.finfo(op.dtype).eps) * size / step


def _at_median_token(vectors: Tensor) -> float:
    """Length of the vectors [..., d] at the median token."""
    return float(vectors.norm(dim=-1).median())
