"""Criterion by which two runs part, on arrays.

A series is one quantity at one site, at the steps that both runs have. Two runs with the same seed are equal
to rounding at first and part slowly; two with different seeds differ by noise all the time. So a row counts
as apart only if all of this holds:

    the ratio of the two is farther from its median so far than `SPREADS` robust deviations of it so far, at
    this site and over all sites of the quantity together,
    and farther than the smallest factor that counts for its quantity (`least_of`),
    and the value lies outside all that the other run took within `AROUND` of that step, before and after.

The series parts at the first of `LASTING` rows in a row that are apart to the same side. A value that is not
finite while the other run's is finite parts at once. The first `EARLIER` rows only serve as what came before.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EARLIER = 10
"""Rows that are only compared with."""
LASTING = 5
"""Rows in a row that have to be apart."""
SPREADS = 6.0
"""Robust standard deviations (1.4826 MAD) of the ratio so far."""
AROUND = 0.1
"""Share of the step, before and after, in which the other run's values are looked up."""
_MOST_EARLIER = 512
_SMALLEST = 5e-324  # the place of 0 on a log scale
_LINEAR = {"update/lost": 0.1, "attention/entropy": 0.5}
"""Quantities that are compared by difference, because they go through 0, and the least that counts."""
_FACTORS = {"loss": 1.25, "lr": 1.05, "gradient/": 3.0, "update/": 3.0, "adam/": 3.0, "attention/": 16.0}
"""Smallest factor that counts, by the beginning of the name; attention logits move from block to block."""
_FACTOR = 1.5

ROUNDING = 1e-5
"""Relative difference of two runs that may come from the order of sums alone."""
SCHEDULED = "lr"
"""The quantity without chance, for which the values around do not matter."""

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def is_linear(quantity: str) -> bool:
    """True for a quantity that is compared by difference and not by ratio."""
    return quantity in _LINEAR


def least_of(quantity: str) -> float:
    """The smallest difference that counts: log₂ of a factor, or in the unit of a linear quantity."""
    if is_linear(quantity):
        return _LINEAR[quantity]
    return math.log2(next((f for name, f in _FACTORS.items() if quantity.startswith(name)), _FACTOR))


def scaled(values: Floats, quantity: str) -> Floats:
    """The scale on which a quantity is compared; NaN for a value that has no place on it."""
    if is_linear(quantity):
        return np.where(np.isfinite(values), values, np.nan)
    usable = np.isfinite(values) & (values >= 0)
    return np.asarray(np.log2(np.maximum(np.where(usable, values, np.nan), _SMALLEST)))


@dataclass(frozen=True)
class Pair:
    """One quantity of two runs at their common sites.

    Attributes:
        steps: [n] common steps.
        run, good: [n, sites] values of the two.
        known: [n, sites] measured by both.
        good_steps: [m] all steps of the good run.
        good_values: [m, sites] its values there; NaN where none was measured.
    """

    steps: NDArray[np.int64]
    run: Floats
    good: Floats
    known: Mask
    good_steps: NDArray[np.int64]
    good_values: Floats


@dataclass(frozen=True)
class Parted:
    """The criterion's answer for each site of a pair.

    Attributes:
        unequal: [sites] first row in which the two differ by more than rounding; -1 if they never do.
        row: [sites] first row that is apart; -1 if none is.
        ratios: [n, sites] run minus good, on the scale of `scaled`; NaN where one has no place on it.
        is_judged: [sites] whether there were enough rows.
    """

    unequal: NDArray[np.int64]
    row: NDArray[np.int64]
    ratios: Floats
    is_judged: Mask


def part(pair: Pair, quantity: str) -> Parted:
    """Apply the criterion to each site."""
    run, good = scaled(pair.run, quantity), scaled(pair.good, quantity)
    ratios = np.where(pair.known, run - good, np.nan)
    away = _away(pair, quantity, run, ratios)
    broken = pair.known & (np.isfinite(pair.run) != np.isfinite(pair.good))
    found = [_first(away[:, k], broken[:, k], pair.known[:, k]) for k in range(ratios.shape[1])]
    enough = (~np.isnan(ratios)).sum(axis=0) >= EARLIER + LASTING
    return Parted(_unequal(pair), np.array(found, dtype=np.int64), ratios, enough)


def _unequal(pair: Pair) -> NDArray[np.int64]:
    with np.errstate(invalid="ignore"):
        size = np.maximum(np.abs(pair.run), np.abs(pair.good))
        is_close = (pair.run == pair.good) | (np.abs(pair.run - pair.good) <= ROUNDING * size)
    differs = pair.known & ~(is_close | (np.isnan(pair.run) & np.isnan(pair.good)))
    return np.where(differs.any(axis=0), differs.argmax(axis=0), -1)


def _away(pair: Pair, quantity: str, run: Floats, ratios: Floats) -> NDArray[np.int8]:
    """[n, sites] 1 where the run is apart upwards, -1 downwards, else 0."""
    found = np.zeros(ratios.shape, dtype=np.int8)
    around = scaled(pair.good_values, quantity)
    start, count = EARLIER, len(pair.steps)
    while start < count:
        end = min(count, start + max(1, start // 20))
        earlier = ratios[: max(EARLIER, start - LASTING)]
        earlier = earlier[np.linspace(0, len(earlier) - 1, min(len(earlier), _MOST_EARLIER)).astype(int)]
        usual = median(earlier)
        reach = np.maximum(least_of(quantity), SPREADS * np.maximum(spread(earlier), common_spread(earlier)))
        low, high = _range(around, pair, start, end) if quantity != SCHEDULED else (math.inf, -math.inf)
        beyond, value = ratios[start:end] - usual, run[start:end]
        found[start:end] = ((beyond > reach) & (value > high)).astype(np.int8)
        found[start:end] -= ((beyond < -reach) & (value < low)).astype(np.int8)
        start = end
    return found


def _range(around: Floats, pair: Pair, start: int, end: int) -> tuple[Floats, Floats]:
    """[sites] least and largest value of the good run around the rows from `start` to `end`."""
    first = np.searchsorted(pair.good_steps, (1 - AROUND) * pair.steps[start])
    last = np.searchsorted(pair.good_steps, (1 + AROUND) * pair.steps[end - 1], side="right")
    near = around[first:last]
    low = np.min(np.where(np.isnan(near), math.inf, near), axis=0, initial=math.inf)
    return low, np.max(np.where(np.isnan(near), -math.inf, near), axis=0, initial=-math.inf)


def _first(away: NDArray[np.int8], broken: Mask, known: Mask) -> int:
    """First row of the first `LASTING` rows that are apart to one side, or that end in a broken value."""
    if not (away.any() or broken.any()):
        return -1
    first, side, length = -1, 0, 0
    for row in np.flatnonzero(known).tolist():
        if broken[row]:
            return first if length else row
        if away[row] == 0 or away[row] != side:
            first, side, length = row, int(away[row]), 0
        length += side != 0
        if length == LASTING:
            return first
    return -1


def spread(ratios: Floats) -> Floats:
    """[sites] robust standard deviation of each site's ratio."""
    return 1.4826 * median(np.abs(ratios - median(ratios)))


def common_spread(ratios: Floats) -> float:
    """Robust standard deviation of the ratio over all sites: how much it depends on chance where it is."""
    return float(spread(ratios.reshape(-1, 1))[0])


def median(values: Floats) -> Floats:
    """[sites] median over the rows that are not NaN; NaN where there is none."""
    ordered = np.sort(values, axis=0)  # NaN last
    counts = (~np.isnan(values)).sum(axis=0)
    middle = np.maximum(0, (counts - 1) // 2)
    return np.asarray(ordered[middle, np.arange(values.shape[1])])
