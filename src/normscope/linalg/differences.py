"""Central differences: Jv from two forwards of f, and whether a derivative is that of its function.

    Jv ≈ (f(x + hv) − f(x − hv)) / 2h,   h = ε^(1/3) · RMS(x) / RMS(v)

The error is about ε^(2/3) of ‖f‖·‖v‖/‖x‖ (2e-5 in float32, 4e-11 in float64): truncation, h²·f′′′/6, and
round-off, ε·f/h, are then of one size. Source: Press et al. 1992, "Numerical Recipes", 5.7.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from normscope.linalg.graph import TangentError

TOLERANCE = 2e-2
"""Relative gap between Jv and finite differences from which they are not the same."""


def central_difference(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, h: float) -> Tensor:
    """(f(x + hv) − f(x − hv)) / 2h, flat, in float64 from f's own precision. Two forwards."""
    with torch.no_grad():
        plus, minus = f(x + h * v), f(x - h * v)
    return (plus.double() - minus.double()).reshape(-1) / (2 * h)


def _forward_difference(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, h: float, y: Tensor) -> Tensor:
    """(f(x + hv) − f(x)) / h, flat, in float64 from f's own precision. One forward."""
    with torch.no_grad():
        return (f(x + h * v).double().reshape(-1) - y.double().reshape(-1)) / h


def step(x: Tensor, v: Tensor, *, power: float = 1 / 3) -> float:
    """h: ε^power of the point's RMS, over that of v."""
    point, direction = (float(t.double().square().mean().sqrt()) for t in (x, v))
    return torch.finfo(x.dtype).eps ** power * max(point, 1e-3) / (direction or 1.0)


def require_tangent(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, jv: Tensor, y: Tensor) -> None:
    """Jv is that of finite differences along v to 2 %. One forward; three or five where that does not say so.

    From x to one side is enough as a rule. Else to both, at one of two steps. The second is for kinks: those
    of ReLU that lie between f(x + hv) and f(x − hv) make a gap ∝ √h. Where it halves the gap, 10 % are
    enough: the gap of a wrong derivative does not shrink with h.

    Args:
        y: f(x).

    Raises:
        TangentError: where it is not; the message says the gap.
    """
    size, before = float(y.double().norm()), 0.0
    for power, one_sided in ((1 / 3, True), (1 / 3, False), (1 / 2, False)):
        h = step(x, v, power=power)
        expected = _forward_difference(f, x, v, h, y) if one_sided else central_difference(f, x, v, h)
        gap, scale = float((jv.double().reshape(-1) - expected).norm()), float(expected.norm())
        round_off = torch.finfo(x.dtype).eps / h * size
        if gap <= TOLERANCE * scale + round_off or (gap <= before / 2 and gap <= 5 * TOLERANCE * scale):
            return
        before = 0.0 if one_sided else gap
    raise TangentError(
        f"the tangent is not that of the function: Jv and finite differences differ by {gap:.2g} at size "
        f"{scale:.2g}; a backward on the way is not the derivative of its forward"
    )
