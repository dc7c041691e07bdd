"""Episodes: an alarm is raised once, and armed again after it was judged normal for a while.

That is 20 rows for spikes, and 200 steps or more for slow alarms, whose values are 10 steps apart or more.
"""

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.alarms.columns import Mask

CALM = 20
"""Normal judgements in a row after which a series may raise its alarm again."""


class Episode:
    """One episode for all columns, for what spreads from one to the others within steps, such as a spike."""

    def __init__(self) -> None:
        self._calm = CALM

    def update(self, bad: Mask) -> Mask | None:
        """Enter one row; the columns to report, None where there is nothing to report.

        Args:
            bad: columns that are beyond the threshold.
        """
        if not bad.any():
            self._calm += 1
            return None
        begins, self._calm = self._calm >= CALM, 0
        return bad if begins else None


class Episodes:
    """An episode for each column, for what lasts.

    Columns that go beyond the threshold within `CALM` rows of the last report are reported together after it.

    Args:
        count: number of columns.
        exact: whether one bad value is a fault whatever follows it. Then a column is reported also where it
            is good again, and waits for others only while a reported one is still bad.
    """

    def __init__(self, count: int, *, exact: bool = False) -> None:
        self._exact = exact
        self._active = np.zeros(count, dtype=bool)
        self._waiting = np.zeros(count, dtype=bool)
        self._calm: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._since = CALM

    def update(self, bad: Mask, judged: Mask) -> Mask | None:
        """Enter one row; the columns to report, None where there are none.

        Args:
            bad: columns that are beyond the threshold.
            judged: columns that have a value in this row; the others stay as they were.
        """
        self._since += 1
        if not bad.any() and not self._active.any():
            return None
        spreads = not self._exact or bool((bad & self._active & ~self._waiting).any())
        self._waiting |= bad & ~self._active
        if not self._exact:
            self._waiting &= bad
        self._calm = np.where(bad, 0, self._calm + judged)
        self._active = (self._active | bad) & (self._calm < CALM)
        if (self._since <= CALM and spreads) or not self._waiting.any():
            return None
        report, self._waiting, self._since = self._waiting, np.zeros_like(bad), 0
        return report
