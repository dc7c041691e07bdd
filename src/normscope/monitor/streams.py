"""Streams: sizes of the tapped tensors, over the forwards of one step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from normscope.monitor import reductions
from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.plan import Plan
from normscope.monitor.taps import Held, Taps

Floats = NDArray[np.float64]


class Part(NamedTuple):
    """Sums of one forward: ‖x‖² of some columns, on the device, and numbers of entries."""

    columns: list[int]
    squares: Tensor
    sizes: list[int]


class Streams:
    """Hooks on the streams at every forward, and on all places at the steps where all figures are due.

    A hook costs time at each call of its module, so those of the branches are set only when they are due.

    Attributes:
        columns: those of the streams, in the order of the forward.
        parts: sums of each forward of the step.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.columns = [column for _, column in plan.of("stream")]
        self._count = len(plan.places)
        each = set(self.columns)
        self._each = Taps(model, {column: tap for column, tap in plan.places.items() if column in each})
        self._rest = Taps(model, {column: tap for column, tap in plan.places.items() if column not in each})
        self._is_all = False
        self.begin([])
        self._each.attach()

    def begin(self, parts: list[Part]) -> None:
        """A step begins; `parts` gets its sums."""
        self.parts = parts
        self._num_checked, self._is_wrong = 0, False

    def remove(self) -> None:
        """Remove the hooks."""
        self._each.remove()
        self._rest.remove()

    def open(self, *, all_places: bool) -> None:
        """A forward begins."""
        self._is_all = all_places
        self._each.open()
        if all_places:
            self._rest.attach()
            self._rest.open()

    def close(self) -> dict[int, Tensor]:
        """A forward ends; its tensors by column."""
        held = self._each.taken()
        if self._is_all:
            rest = self._rest.taken()
            if rest:  # else they lie in compiled code, which would be compiled again without them
                self._rest.remove()
            held |= rest
        columns = sorted(held)
        taken = [held[column] for column in columns]
        self.parts.append(Part(columns, _squares(taken), [each.tensor.numel() for each in taken]))
        return {column: each.tensor for column, each in held.items()}

    def of(self, run: Callable[[], object]) -> dict[int, Tensor]:
        """The streams by column in a further forward, which `run` runs; it counts for no figure."""
        self._each.open()
        try:
            run()
        finally:
            held = self._each.taken()
        return {column: each.tensor for column, each in held.items()}

    @property
    def is_wrong(self) -> bool:
        """Whether one of the step so far is not finite. Waits for the device; each forward is read once."""
        if not self._is_wrong and self._num_checked < len(self.parts):
            new = self.parts[self._num_checked :]
            self._is_wrong = not all(bool(part.squares.isfinite().all()) for part in new)
            self._num_checked = len(self.parts)
        return self._is_wrong

    def last_rms(self) -> Floats:
        """RMS of each column [columns] in the last forward. Waits for the device."""
        return self.rms_of(self.parts[-1:])

    def rms_of(self, parts: Sequence[Part]) -> Floats:
        """RMS of each column [columns] over the forwards that saw it, `NOT_MEASURED` where none did."""
        squares, sizes = np.zeros(self._count), np.zeros(self._count)
        for part in parts:
            squares[part.columns] += part.squares.cpu().double().numpy()
            sizes[part.columns] += part.sizes
        is_seen = sizes > 0
        rms = np.full(self._count, NOT_MEASURED)
        rms[is_seen] = np.sqrt(squares[is_seen] / sizes[is_seen])
        return rms


def _squares(held: Sequence[Held]) -> Tensor:
    taken = [each.square for each in held if each.square is not None]
    if len(taken) == len(held) and held:
        return torch.stack([each.double() for each in taken])  # all on a CPU
    return reductions.squares([each.tensor for each in held])
