"""Streams: sizes of the tapped tensors, over the forwards of one step."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from normscope.monitor import reductions
from normscope.monitor.alarms import NOT_MEASURED, is_measured
from normscope.monitor.plan import Plan
from normscope.monitor.taps import Held, Taps

Floats = NDArray[np.float64]


class Streams:
    """Hooks on the streams at every forward, and on all places at the steps where all figures are due.

    A hook costs time at each call of its module, so those of the branches are set only when they are due.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.columns = [column for _, column in plan.of("stream")]
        self._count = len(plan.places)
        each = set(self.columns)
        self._each = Taps(model, {column: tap for column, tap in plan.places.items() if column in each})
        self._rest = Taps(model, {column: tap for column, tap in plan.places.items() if column not in each})
        self._is_all = False
        self._each.attach()
        self.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        self._each.remove()
        self._rest.remove()

    def clear(self) -> None:
        """Begin a step."""
        self._squares = np.full(self._count, NOT_MEASURED)
        self._sizes = np.ones(self._count)
        self._num_forwards = 0

    def open(self, *, all_places: bool) -> None:
        """A forward begins."""
        self._is_all = all_places
        self._each.open()
        if all_places:
            self._rest.attach()
            self._rest.open()

    def close(self) -> tuple[dict[int, Tensor], Floats]:
        """A forward ends; its tensors by column, and the RMS of each column in it."""
        held = self._each.taken()
        if self._is_all:
            rest = self._rest.taken()
            if rest:  # else they lie in compiled code, which would be compiled again without them
                self._rest.remove()
            held |= rest
        columns = sorted(held)
        squares, sizes = np.full(self._count, NOT_MEASURED), np.ones(self._count)
        squares[columns] = _squares([held[column] for column in columns]).cpu().double().numpy()
        sizes[columns] = [held[column].tensor.numel() for column in columns]
        is_first = not self._num_forwards
        self._num_forwards += 1
        self._squares = squares if is_first else self._squares + squares
        self._sizes = sizes if is_first else self._sizes + sizes
        tensors = {column: each.tensor for column, each in held.items()}
        return tensors, _roots(squares, sizes)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Mask of the columns [columns] that some forward of the step has seen."""
        return is_measured(self._squares)

    @property
    def is_wrong(self) -> bool:
        """Whether one of the step so far is not finite."""
        return not bool(np.isfinite(self._squares[self.seen]).all())

    def rms(self) -> Floats:
        """RMS of each stream over the forwards of the step, `NOT_MEASURED` where none was seen."""
        return _roots(self._squares, self._sizes)[self.columns]


def _roots(squares: Floats, sizes: Floats) -> Floats:
    return np.where(is_measured(squares), np.sqrt(squares / sizes), NOT_MEASURED)


def _squares(held: Sequence[Held]) -> Tensor:
    taken = [each.square for each in held if each.square is not None]
    if len(taken) == len(held) and held:
        return torch.stack([each.double() for each in taken])  # all on a CPU
    return reductions.squares([each.tensor for each in held])
