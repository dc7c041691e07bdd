"""Central differences: Jv from two forwards of f, and whether a derivative is that of its function.

    Jv ≈ (f(x + hv) − f(x − hv)) / 2h,   h = ε^(1/3) · RMS(x) / RMS(v)

The error is about ε^(2/3) of ‖f‖·‖v‖/‖x‖ (2e-5 in float32, 4e-11 in float64): truncation, h²·f′′′/6, and
round-off, ε·f/h, then have the same size. Source: Press et al. 1992, "Numerical Recipes", 5.7.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.linalg.graph import TangentError

Map = Callable[[Tensor], Tensor]

TOLERANCE = 2e-2  # relative gap between Jv and finite differences from which they are not the same
KINKED = 5 * TOLERANCE  # the same where the gap shrinks with the step
LONGEST = 0.1  # the longest step, relative to x

HIDDEN = "tangent not compared with finite differences: f's round-off hides it"


def central_difference(f: Map, x: Tensor, v: Tensor, h: float) -> Tensor:
    """(f(x + hv) − f(x − hv)) / 2h, flat, in float64 from f's own precision. Two forwards."""
    with torch.no_grad():
        plus, minus = f(x + h * v), f(x - h * v)
    return (plus.double() - minus.double()).reshape(-1) / (2 * h)


def step(x: Tensor, v: Tensor, *, power: float = 1 / 3) -> float:
    """h: ε^power of the point's RMS, over that of v."""
    point, direction = (float(t.double().square().mean().sqrt()) for t in (x, v))
    return torch.finfo(x.dtype).eps ** power * max(point, 1e-3) / (direction or 1.0)


def require_tangent(f: Map, x: Tensor, v: Tensor, jv: Tensor, y: Tensor) -> str:
    """Check that Jv is that of finite differences along v, to 2 %. One forward or more.

    The first difference is one-sided, the next are central, at two steps. The shorter step detects kinks:
    those of ReLU between f(x + hv) and f(x − hv) make a gap ∝ √h, while the gap of a wrong derivative does
    not shrink with h. So where the shorter step halves the gap, a gap of 10 % is accepted.

    The round-off of f, ε·‖f‖/h, is allowed for. Where it is above 2 % of both Jv and the difference (f has a
    large offset, or a small gain), it would hide any Jv: then longer steps, up to a tenth of x, are tried.

    Args:
        y: f(x).

    Returns:
        A note where round-off hides the tangent at those steps too; else "".

    Raises:
        TangentError: Jv differs; the message gives the gap.
    """
    jv, h = jv.double().reshape(-1), step(x, v)
    with torch.no_grad():
        one_sided = (f(x + h * v).double() - y.double()).reshape(-1) / h
    first = _compare(x, jv, y, h, one_sided)
    if first.agrees:
        return ""
    if not first.hidden:
        usual = _central(f, x, v, jv, y, h)
        if usual.agrees:
            return ""
        short = _central(f, x, v, jv, y, step(x, v, power=1 / 2))
        if short.agrees or (short.gap <= usual.gap / 2 and short.gap <= KINKED * short.scale):
            return ""
        if not short.hidden:
            raise _wrong(f, x, short)
    return _at_longer_steps(f, x, v, jv, y)


@dataclass(frozen=True)
class _Comparison:
    """Norms from a comparison of Jv with finite differences at one step."""

    gap: float
    scale: float
    round_off: float
    jv: float

    @property
    def agrees(self) -> bool:
        """True where the gap is small, and a wrong Jv would make a larger one."""
        telling = self.round_off <= TOLERANCE * max(self.scale, self.jv)
        return self.gap <= TOLERANCE * self.scale + (self.round_off if telling else 0.0)

    @property
    def hidden(self) -> bool:
        """True where round-off alone explains the gap, whatever Jv is."""
        return not self.agrees and self.gap <= TOLERANCE * self.scale + self.round_off


def _compare(x: Tensor, jv: Tensor, y: Tensor, h: float, expected: Tensor) -> _Comparison:
    gap, scale, size = (float(t.norm()) for t in (jv - expected, expected, jv))
    return _Comparison(gap, scale, _round_off(x, y) / h, size)


def _central(f: Map, x: Tensor, v: Tensor, jv: Tensor, y: Tensor, h: float) -> _Comparison:
    return _compare(x, jv, y, h, central_difference(f, x, v, h))


def _at_longer_steps(f: Map, x: Tensor, v: Tensor, jv: Tensor, y: Tensor) -> str:
    """Compare at the step that lifts Jv above the round-off, a tenth of x at most, and at half of it."""
    usual, size = step(x, v), float(jv.norm())
    longest = step(x, v, power=0) * LONGEST
    wanted = 2 * _round_off(x, y) / (TOLERANCE * size) if size else longest
    h = min(max(wanted, usual), longest)
    long = _central(f, x, v, jv, y, h)
    if long.agrees:
        return ""
    half = _central(f, x, v, jv, y, h / 2)
    if half.agrees:
        return ""
    bends = half.gap <= long.gap / 2  # ∝ h² where f is smooth
    if bends or long.gap <= KINKED * long.scale + long.round_off:
        return HIDDEN
    raise _wrong(f, x, long)


def _round_off(x: Tensor, y: Tensor) -> float:
    return torch.finfo(x.dtype).eps * float(y.double().norm())


def _wrong(f: Map, x: Tensor, seen: _Comparison) -> TangentError:
    gap = f"Jv and finite differences differ by {seen.gap:.2g} at size {seen.scale:.2g}"
    with torch.no_grad():
        once, again = f(x).double(), f(x).double()
    if not float((once - again).norm()) <= torch.finfo(x.dtype).eps ** 0.5 * float(once.norm()):
        return TangentError(f"f is not the same at each call: it changes or is random; {gap}")
    return TangentError(
        f"the tangent is not that of the function: {gap}; a backward in f is not the derivative of its "
        "forward, or f has a kink at x (ReLU at 0)"
    )
