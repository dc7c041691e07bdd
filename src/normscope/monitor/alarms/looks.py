"""Looks: the last values of many series, some steps apart, for what changes slowly."""

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.alarms.columns import Floats, Look, Mask

APART = 10
"""Fewest steps between two values of a slow series."""


class Looks:
    """The last values of several series in the order of time, at least `APART` steps apart.

    Attributes:
        values: [series, size], the newest last.
        steps, paths: [size], their steps, and the sums of the learning rates up to them.
        run: [series], number of usable values in a row up to the newest.
    """

    def __init__(self, count: int, size: int) -> None:
        self.values: Floats = np.zeros((count, size))
        self.steps: NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self.paths: Floats = np.zeros(size)
        self.run: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.first_step: int | None = None
        self.first_path = 0.0

    def enter(self, look: Look, values: Floats, usable: Mask) -> bool:
        """Enter a value of each series, and say True; False where the last one was too few steps ago.

        Args:
            values: [series], finite where `usable`.
        """
        step = look.step
        if self.first_step is None:
            self.first_step, self.first_path = step, look.path
        elif step - self.steps[-1] < APART:
            return False
        self.values[:, :-1] = self.values[:, 1:]
        self.values[:, -1] = np.where(usable, values, 0.0)
        for held, new in ((self.steps, step), (self.paths, look.path)):
            held[:-1] = held[1:]
            held[-1] = new
        self.run = np.where(usable, self.run + 1, 0)
        return True


def logarithm(look: Look, numbers: NDArray[np.intp]) -> tuple[Floats, Mask]:
    """Logarithms of the columns `numbers`, and the mask of those that are positive and usable."""
    positive = np.where(look.usable[numbers], look.values[numbers], 0.0)
    usable = positive > 0
    return np.log(positive, where=usable, out=np.zeros_like(positive)), usable
