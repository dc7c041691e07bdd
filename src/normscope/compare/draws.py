"""Fresh weights of a model at several seeds, and the law that each parameter is drawn from."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, named_parameters

_SAMPLE = 2048
_MOST = 2**18
"""Values of one parameter and seed at most that count; of more, evenly spaced ones."""
_ROWS = 256
"""Rows of a matrix at most that are tested for being orthogonal."""
ORTHOGONAL = 0.15
"""Largest share of the spread of squared singular values that an independent matrix of the same shape has."""


@dataclass(frozen=True)
class Draw:
    """Fresh values of one parameter at all seeds, as sums; sums of two draws are those of both.

    Attributes:
        number: values at all seeds.
        sums: Σx, Σx², Σx³, Σx⁴.
        low, high: the smallest and the largest value.
        zero_rows: rows of zeros, per seed.
        spread: of the squared singular values, over that of an independent matrix; None for vectors.
        sample: some of the values.
        is_fixed: whether all seeds give the same values.
    """

    number: int
    sums: tuple[float, float, float, float]
    low: float
    high: float
    zero_rows: float
    spread: float | None
    sample: Tensor
    is_fixed: bool

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.sums[0] / self.number

    @property
    def is_constant(self) -> bool:
        """Whether all values are one."""
        return self.low == self.high

    @property
    def deviation(self) -> float:
        """Standard deviation of the values."""
        return 0.0 if self.is_constant else math.sqrt(max(self._moment(2), 0.0))

    @property
    def kurtosis(self) -> float:
        """E(x − μ)⁴/σ⁴, 3 for a normal law."""
        return self._moment(4) / self._moment(2) ** 2 if self.deviation else 0.0

    def _moment(self, k: int) -> float:
        s1, s2, s3, s4 = (each / self.number for each in self.sums)
        return s2 - s1**2 if k == 2 else s4 - 4 * s1 * s3 + 6 * s1**2 * s2 - 3 * s1**4

    def __add__(self, other: "Draw") -> "Draw":
        spreads = [each for each in (self.spread, other.spread) if each is not None]
        return Draw(
            self.number + other.number,
            tuple(map(sum, zip(self.sums, other.sums, strict=True))),  # type: ignore[arg-type]
            min(self.low, other.low),
            max(self.high, other.high),
            self.zero_rows + other.zero_rows,
            sum(spreads) / len(spreads) if spreads else None,
            torch.cat([self.sample, other.sample]),
            self.is_fixed and other.is_fixed,
        )


@dataclass(frozen=True)
class Start:
    """Fresh weights of one model.

    Attributes:
        draws: parameter → its values.
        seeds: number of seeds.
        is_fixed: whether most weights that are not constant are the same at all seeds.
    """

    draws: Mapping[str, Draw]
    seeds: int
    is_fixed: bool


def start_of(build: Callable[[int], nn.Module], anatomy: Anatomy, seeds: Sequence[int]) -> Start:
    """The fresh weights of a model at several seeds; one model is in memory at a time.

    Args:
        build: the model with fresh weights from a seed.
        anatomy: its reading, which is not needed here.
        seeds: at which it is built.
    """
    found: dict[str, list[_One]] = {}
    for seed in seeds:
        for name, parameter in named_parameters(build(seed)):
            if parameter.is_floating_point() and parameter.numel():
                found.setdefault(name, []).append(_one(parameter.detach(), first=seed == seeds[0]))
    draws = {name: _drawn(each) for name, each in found.items()}
    random = [draw for draw in draws.values() if not draw.is_constant]
    fixed = sum(draw.number for draw in random if draw.is_fixed)
    return Start(draws, len(seeds), 2 * fixed > sum(_one_seed(draw, len(seeds)) for draw in random))


def _one_seed(draw: Draw, seeds: int) -> float:
    """Number of values at one seed; a fixed draw has those of one only."""
    return draw.number if draw.is_fixed else draw.number / seeds


@dataclass(frozen=True)
class _One:
    """Values of one parameter at one seed."""

    number: int
    sums: tuple[float, float, float, float]
    low: float
    high: float
    zero_rows: int
    spread: float | None
    sample: Tensor


def _one(tensor: Tensor, first: bool) -> _One:
    flat = tensor.flatten()
    values = flat[:: -(-len(flat) // _MOST)].double()
    sums = tuple(float((values**k).sum()) for k in (1, 2, 3, 4))
    step = max(1, len(values) // _SAMPLE)
    rows = tensor.flatten(1) if tensor.dim() > 1 else None
    return _One(
        len(values),
        sums,  # type: ignore[arg-type]
        float(flat.min()),
        float(flat.max()),
        int((~rows.any(1)).sum()) if rows is not None and bool(rows.any()) else 0,
        _spread(tensor) if first else None,
        values[::step][:_SAMPLE].float().cpu(),
    )


def _drawn(each: Sequence[_One]) -> Draw:
    first = each[0]
    fixed = all(one.sums == first.sums and torch.equal(one.sample, first.sample) for one in each)
    kept = each[:1] if fixed else each  # the same values again are no further evidence
    return Draw(
        sum(one.number for one in kept),
        tuple(sum(one.sums[k] for one in kept) for k in range(4)),  # type: ignore[arg-type]
        min(one.low for one in kept),
        max(one.high for one in kept),
        first.zero_rows,
        first.spread,
        torch.cat([one.sample for one in kept]),
        fixed,
    )


def _spread(tensor: Tensor) -> float | None:
    """Variance of the squared singular values over their squared mean, over that of an independent matrix.

    Marčenko and Pastur (1967): for n ≤ m independent entries it is n/m, so that the result is near 1; for
    orthogonal rows it is 0. Of large matrices some rows are taken, which stay orthogonal.
    """
    if tensor.dim() != 2 or min(tensor.shape) < 4:
        return None
    matrix = tensor.double() if tensor.shape[0] <= tensor.shape[1] else tensor.double().T
    matrix = matrix[:_ROWS]
    gram = matrix @ matrix.T
    trace = gram.trace()
    if not trace:
        return None
    n, m = matrix.shape
    return float((gram.square().sum() * n / trace**2 - 1) / (n / m))


def law_of(draw: Draw) -> str:
    """The law in words; its parameters are given where they say more than the deviation."""
    if draw.is_constant:
        return f"constant {draw.low:g}"
    if draw.spread is not None and draw.spread < ORTHOGONAL:
        return "orthogonal"
    z = (draw.sample - draw.mean).abs().max() / draw.deviation
    excess = draw.kurtosis - 3
    if excess < -1.05 and z < 1.85:
        return "uniform"
    if excess < -0.2 and z < 2.6:
        return "truncated normal"
    if z < 3.2 and draw.number > 20_000:
        return f"cut off at {float(z):.2g} deviations"
    return "normal" if abs(excess) < 0.4 else f"of kurtosis {draw.kurtosis:.2g}"
