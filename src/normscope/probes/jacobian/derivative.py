"""Check that a Jacobian is that of its forward: one Jv beside central differences, token by token.

The stack's entry is shifted by ±hδ at two steps h. Where the derivative is wrong, the gap between Jv and the
differences does not depend on h; where it is right, the gap is the differences' own error, which shrinks with
h at least as √h (kinks of ReLU). So from the gaps g at a step of 4h and of h,

    (error of the differences at h)² ≤ (g₄ₕ² − gₕ²)/3,        (error of the derivative)² = gₕ² − that

A saturated softmax bends within both steps, and nothing shrinks; a forward with steps (rounding under a
straight-through gradient) jumps within them. There the two gaps, as vectors, differ about as much as they are
long, and nothing is judged. A wrong derivative of a smooth forward leaves the same vector at both steps.

Tokens are compared one by one and the median decides: a router that flips under the shift moves few tokens, a
wrong derivative moves all.
"""

from math import sqrt

import torch
from torch import Tensor

from normscope.linalg import JacobianOperator

STEPS = (2e-3, 5e-4)  # sizes of the shift, relative to the stream's RMS, the long one first

TOLERANCE = 2e-2
"""Relative error from which a derivative is wrong: as for the first Jv of a function in `normscope.linalg`.
The differences' own error is taken off before; their rounding is left."""

SAME = 0.5
"""Largest difference of the gaps at both steps, in gaps, that a wrong derivative leaves.

Where the derivative is right, a gap is the differences' own error, and this is 1 or more by the law above."""

Moves = tuple[Tensor, Tensor]  # central differences (x₊ − x₋)/2h at one site, at each of `STEPS`; float64


def compare(
    op: JacobianOperator, source: Moves, target: Moves, size: Tensor, eps: float = 0.0
) -> float | str:
    """Relative error of J at the median token, beside how `target` moves with `source`, or why it is unknown.

    Costs two products.

    Args:
        op: J, from the tensor at the source to the one at the target.
        source, target: how both move.
        size: the tensor at the target: its round-off is that of the differences.
        eps: ε of the coarsest precision in the forward, where that is not the map's own.
    """
    jvs = [op.matvec(dx.reshape(-1).to(op.dtype)).double() for dx in source]
    gaps = [jv.reshape(dy.shape) - dy for jv, dy in zip(jvs, target, strict=True)]
    (far, far_moved), (gap, moved) = (
        (_at_median_token(off), _at_median_token(dy)) for off, dy in zip(gaps, target, strict=True)
    )
    pushed = _at_median_token(jvs[1].reshape(target[1].shape))
    # Both ends of a difference are rounded, and so is what makes them: 8 units in the last place a token.
    eps = max(eps, torch.finfo(op.dtype).eps)
    round_off = 8 * eps * float(size.detach().double().norm(dim=-1).median()) / STEPS[1]
    if far_moved < moved < pushed:
        bends = moved > 1.2 * far_moved
        if bends and gap > TOLERANCE * moved:
            return "the forward bends within the steps of the finite differences"
    scale = max(moved, pushed)
    if round_off > TOLERANCE * scale:
        return "round-off hides the finite differences"
    own = max(0.0, far**2 - gap**2) / 3
    if far > scale / 2 and 2 * own > gap**2 > (TOLERANCE * scale) ** 2:
        # Rare jumps of a coarse quantiser: the long step meets one, the short one none, and nothing shrinks.
        return "the forward jumps within the steps of the finite differences"
    wrong = max(0.0, sqrt(max(0.0, gap**2 - own)) - round_off)
    if wrong > TOLERANCE * scale and _at_median_token(gaps[0] - gaps[1]) > SAME * gap:
        return "the forward bends or jumps within the steps of the finite differences"
    return wrong / scale if scale else 0.0


def is_wrong(error: float | str) -> bool:
    """Whether a derivative with this result of `compare` is not that of its forward."""
    return not isinstance(error, str) and error > TOLERANCE


def _at_median_token(vectors: Tensor) -> float:
    """Length of the vectors [..., d] at the median token."""
    return float(vectors.norm(dim=-1).median())
