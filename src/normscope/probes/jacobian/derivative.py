"""Whether a Jacobian is that of its forward: one Jv beside central differences, token by token.

The stack's entry is shifted by ±hδ at two steps h. Where the derivative is wrong, the gap between Jv and the
differences does not depend on h; where it is right, the gap is the differences' own error, which shrinks with
h at least as √h (kinks of ReLU). So from the gaps g at a step of 4h and of h,

    (error of the differences at h)² ≤ (g₄ₕ² − gₕ²)/3,        (error of the derivative)² = gₕ² − that

Tokens are compared one by one and the median decides: a router that flips under the shift moves few tokens, a
wrong derivative moves all.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from normscope.linalg import JacobianOperator

STEPS = (2e-3, 5e-4)
"""Sizes of the shift, relative to the stream's RMS, the long one first."""

TOLERANCE = 2e-2
"""Relative error from which a derivative is wrong: as for the first Jv of a function in `normscope.linalg`.
The differences' own error is taken off before; what is left in models that are right is their rounding."""


@dataclass(frozen=True)
class Shifted:
    """Central differences at one site, (x₊ − x₋)/2h: at the long step and at the short one; float64."""

    long: Tensor
    short: Tensor


@dataclass(frozen=True)
class Comparison:
    """A derivative beside the differences.

    Attributes:
        error: relative error of the derivative, at the median token; None where the differences cannot tell.
        reason: why they cannot.
    """

    error: float | None
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the derivative is not that of its forward."""
        return self.error is not None and self.error > TOLERANCE


def compare(
    op: JacobianOperator, source: Shifted, target: Shifted, size: Tensor, eps: float = 0.0
) -> Comparison:
    """J of `op` beside how `target` moves when `source` does. Costs two products.

    Args:
        op: J, from the tensor at the source to the one at the target.
        source, target: how both move.
        size: the tensor at the target: its round-off is that of the differences.
        eps: ε of the coarsest precision in the forward, where that is not the map's own.
    """
    jvs = [op.matvec(dx.reshape(-1).to(op.dtype)).double() for dx in (source.long, source.short)]
    long, short = (
        _Gap.of(jv.reshape(dy.shape), dy) for jv, dy in zip(jvs, (target.long, target.short), strict=True)
    )
    # Both ends of a difference are rounded, and so is what makes them: 8 units in the last place a token.
    eps = max(eps, torch.finfo(op.dtype).eps)
    round_off = 8 * eps * float(size.detach().double().norm(dim=-1).median()) / STEPS[1]
    if long.moved < short.moved < short.pushed:
        bends = short.moved > 1.2 * long.moved
        if bends and short.gap > TOLERANCE * short.moved:
            return Comparison(None, "the forward bends within the steps of the finite differences")
    scale = max(short.moved, short.pushed)
    if round_off > TOLERANCE * scale:
        return Comparison(None, "round-off hides the finite differences")
    own = max(0.0, long.gap**2 - short.gap**2) / 3
    if long.gap > scale / 2 and 2 * own > short.gap**2 > (TOLERANCE * scale) ** 2:
        # Rare jumps of a coarse quantiser: the long step meets one, the short one none, and nothing shrinks.
        return Comparison(None, "the forward jumps within the steps of the finite differences")
    wrong = max(0.0, sqrt(max(0.0, short.gap**2 - own)) - round_off)
    return Comparison(wrong / scale if scale else 0.0)


@dataclass(frozen=True)
class _Gap:
    """At one step, at the median token: ‖Jv − d‖, ‖d‖ and ‖Jv‖ of the difference d."""

    gap: float
    moved: float
    pushed: float

    @classmethod
    def of(cls, jv: Tensor, difference: Tensor) -> "_Gap":
        return cls(*(float(t.norm(dim=-1).median()) for t in (jv - difference, difference, jv)))
