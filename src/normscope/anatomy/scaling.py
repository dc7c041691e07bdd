"""Measure what a part of the graph does to the scale of a tensor: a norm, or another factor of its own.

The part runs again on random tensors of three sizes. It is a norm where a large tensor comes out with one
root mean square G for all tokens: y = G·c/rms(c), with c the tensor or the centred one. A tiny tensor shows
ε, and one of mean square ε shows whether it is under the root. So all spellings of a norm read the same.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from normscope.anatomy.graph import Value
from normscope.anatomy.replay import CannotReplay, Replay

_LARGE, _TINY = 1e8, 1e-20
_CLOSE, _CONSTANT = 1e-6, 1e-9
_MOST_ELEMENTS = 2**26
_MOST_AXES = 4
_Layout = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scaling:
    """The measured form of y = G·c/√(mean c² + ε).

    Attributes:
        axes: axes of the result along which the factor is constant.
        norm: whether the part is a norm over these axes; the other fields hold for norms alone.
        centred: whether c is the tensor less its mean.
        gain: G.
        eps: ε beside the mean square, None where the root holds none.
        count: number of elements that the mean square is taken over.
    """

    axes: tuple[int, ...]
    norm: bool = False
    centred: bool = False
    gain: float = 1.0
    eps: float | None = None
    count: int = 1


def measure_scaling(
    starts: Sequence[Value],
    ends: Sequence[Value],
    num_gains: int,
    axes: tuple[int, ...] | None,
    replay: Replay,
) -> Scaling | None:
    """The scaling between a value and the result, None where no factor is constant along an axis.

    Args:
        starts: the value, then `num_gains` weights that multiply and are set to 1, then those that are added
            and are set to 0.
        ends: the result, then the values that may be the factor.
        axes: axes along which the factor is constant; None to find them.

    Raises:
        CannotReplay: an op of the part cannot run again, or the tensor is too large.
    """
    if math.prod(starts[0].shape) > _MOST_ELEMENTS:
        raise CannotReplay("the tensor is too large")
    with _disable_current_modes():  # a model with fake weights is read in their mode
        return _scaling(starts, ends, num_gains, axes, replay)


def _scaling(
    starts: Sequence[Value],
    ends: Sequence[Value],
    num_gains: int,
    axes: tuple[int, ...] | None,
    replay: Replay,
) -> Scaling | None:
    one = torch.ones((), dtype=torch.float64)
    given = {w: (one if i < num_gains else 0 * one).expand(w.shape) for i, w in enumerate(starts[1:])}

    def run(x: Tensor) -> list[Tensor]:
        return replay.run({starts[0]: x, **given}, ends)

    x, other = (_LARGE * _draw(starts[0].shape, seed) for seed in (0, 1))
    y, *factors = run(x)
    if axes is None:
        axes = next((found for f in factors if (found := _constant_axes(f.expand(y.shape)))), ())
    if not axes:
        return None
    again = run(7 * other)[0]
    for layout, centred in itertools.product(_layouts(x.shape, y.shape), (False, True)):
        gain = _gain(y, _carrier(layout(x), axes, centred), axes)
        # A second tensor shows that the factor is a function of the first.
        if gain and _is_close(_gain(again, _carrier(layout(7 * other), axes, centred), axes), gain):
            eps = _eps(lambda x: run(x)[0], x / _LARGE, axes, centred, gain, layout)
            return Scaling(axes, True, centred, gain, eps, math.prod(y.shape[a] for a in axes))
    return Scaling(axes)


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """A random tensor whose tokens have means of their own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return 0.3 + torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _constant_axes(factor: Tensor) -> tuple[int, ...]:
    """Axes along which a factor is constant; none where all are of one entry."""
    bound = _CONSTANT * factor.abs().amax()
    axes = tuple(a for a in range(factor.ndim) if bool((factor.amax(a) - factor.amin(a) <= bound).all()))
    return axes if any(factor.shape[a] > 1 for a in axes) else ()


def _layouts(shape: torch.Size, end: torch.Size) -> Iterator[_Layout]:
    """Ways to bring a tensor into the shape of the result: views of it and of its permutations."""
    orders = itertools.permutations(range(len(shape))) if len(shape) <= _MOST_AXES else [range(len(shape))]
    return (partial(_laid_out, order=tuple(order), end=end) for order in orders)


def _laid_out(x: Tensor, order: tuple[int, ...], end: torch.Size) -> Tensor:
    return x.permute(order).reshape(end)


def _carrier(x: Tensor, axes: tuple[int, ...], centred: bool) -> Tensor:
    return x - x.mean(axes, keepdim=True) if centred else x


def _rms(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.square().mean(axes, keepdim=True).sqrt()


def _gain(y: Tensor, carrier: Tensor, axes: tuple[int, ...]) -> float:
    """G of y = G·c/rms(c), 0.0 where y is not of this form."""
    unit = carrier / _rms(carrier, axes)
    gain = float((y * unit).mean())
    return gain if bool(((y - gain * unit).abs() <= _CLOSE * abs(gain) * unit.abs().amax()).all()) else 0.0


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE)


def _eps(
    run: _Layout, x: Tensor, axes: tuple[int, ...], centred: bool, gain: float, layout: _Layout
) -> float | None:
    """ε of y = G·c/√(mean c² + ε); None for a norm without ε, with σ + ε, or with max(σ, ε)."""
    tiny = _carrier(layout(_TINY * x), axes, centred)
    ratio = float((_rms(run(_TINY * x), axes) / _rms(tiny, axes)).mean())
    if not math.isfinite(ratio) or ratio == 0 or _is_close(ratio, abs(gain)):
        return None
    eps = (gain / ratio) ** 2
    x = x * math.sqrt(eps)
    carrier = _carrier(layout(x), axes, centred)
    under = gain * carrier / (carrier.square().mean(axes, keepdim=True) + eps).sqrt()
    return eps if torch.allclose(run(x), under, rtol=_CLOSE, atol=_CLOSE * abs(gain)) else None
