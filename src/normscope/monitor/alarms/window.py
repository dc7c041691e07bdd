"""Window: median and MAD of the last values of many series, with spikes kept out."""

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.alarms.columns import Floats, Mask

SIZE = 64
"""Values in a window. OLMo-core keeps 128 and judges from 64 on; a shorter one follows a falling loss
sooner."""
LEAST = 20
"""Values from which a series is judged, as in OLMo-core's step-skipping optimizer."""
ANEW = 32
"""Values in a row beyond the threshold after which they are the series' new level, half a window."""
SIGMA = 1.4826
"""Standard deviation of a normal distribution over its MAD."""
ROUNDING = 1e-6
"""Least standard deviation over the largest value so far: differences under it are rounding."""


class Window:
    """The last values of several series; a value beyond the threshold is not entered.

    The threshold of a series is median + max(sigmas · 1.4826 · MAD, effect), one-sided. Median and MAD are
    renewed after every 16th part of a window, so a row costs O(columns · SIZE log SIZE / 4) at most.

    With `recent`, values are judged and entered less the median of the last `recent` ones: in a series that
    falls or rises steadily, an old level hides a jump, or makes one.

    Args:
        count: number of series.
        sigmas: robust standard deviations above the median that make a spike.
        effect: smallest excess over the median that counts, in the units of the values.
        relative: smallest excess as a share of |median|.
        recent: number of the last values whose median is the level of a series; 0 for the whole window.
        least: values that a series needs before it is judged, those of the first level included.
    """

    def __init__(
        self,
        count: int,
        *,
        sigmas: float,
        effect: float = 0.0,
        relative: float = 0.0,
        recent: int = 0,
        least: int = LEAST,
    ) -> None:
        self._sigmas, self._effect, self._relative = sigmas, effect, relative
        self._least = least - recent
        self._last: Floats = np.zeros((count, recent))
        self._known: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._held: Floats = np.full((count, SIZE), np.inf)
        self._entered: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._beyond: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._largest: Floats = np.zeros(count)
        self._age = 0
        self._numbers = np.arange(count)
        self._median: Floats = np.zeros(count)
        self._limit: Floats = np.full(count, np.inf)

    @property
    def limits(self) -> Floats:
        """[series] the values above which the next ones are spikes, infinite for a series not yet judged."""
        return self._limit

    def judge(self, values: Floats, usable: Mask) -> tuple[Mask, Floats]:
        """Enter one value of each series; mask of the spikes, and the medians before them.

        Args:
            values: [series], finite where `usable`.
            usable: [series], the values to judge and to enter.
        """
        values = np.where(usable, values, 0.0)
        size = self._last.shape[1]
        level = middle(self._last) if size else np.zeros(len(values))
        median = level + self._median
        excess = values - level
        ready = usable & (self._known >= size)
        spikes: Mask = ready & (excess > self._limit)  # an infinite limit: not judged yet
        entering = usable & ~spikes
        where = self._numbers[entering & ready]
        self._held[where, self._entered[where] % SIZE] = excess[where]
        self._entered[where] += 1
        if size:
            where = self._numbers[entering]
            self._last[where, self._known[where] % size] = values[where]
            self._known[where] += 1
        np.maximum(self._largest, np.abs(values), out=self._largest, where=entering)
        self._beyond = np.where(spikes, self._beyond + 1, np.where(usable, 0, self._beyond))
        self._age += 1
        if (anew := self._beyond >= ANEW).any():
            self._forget(anew)
        if self._age * 16 >= min(int(self._entered.max(initial=0)), SIZE):
            self._renew()
        return spikes, median

    def _forget(self, series: Mask) -> None:
        self._held[series] = np.inf
        self._entered[series] = self._known[series] = 0
        self._beyond[series] = 0
        self._largest[series] = 0.0
        self._limit = np.where(series, np.inf, self._limit)

    def _renew(self) -> None:
        """Median and MAD of the series that have enough values; empty places are infinite and sort last."""
        self._age = 0
        ready = self._numbers[self._entered >= self._least]
        if not len(ready):
            return
        held, full = self._held[ready], np.minimum(self._entered[ready], SIZE)
        median = _median(held, full)
        sigma = SIGMA * _median(np.abs(held - median[:, None]), full)
        sigma = np.maximum(sigma, ROUNDING * self._largest[ready])
        least = np.maximum(self._effect, self._relative * np.abs(median))
        self._median = self._median.copy()  # the last one may be in use
        self._median[ready] = median
        self._limit[ready] = median + np.maximum(self._sigmas * sigma, least)


def middle(values: Floats) -> Floats:
    """Median over the last axis; numpy's own takes several times as long on short ones."""
    ordered, size = np.sort(values, axis=-1), values.shape[-1]
    return np.asarray((ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2)


def _median(values: Floats, count: NDArray[np.int64]) -> Floats:
    """Median of the first `count` values of each row in the order of size."""
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    return np.asarray((ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2)
