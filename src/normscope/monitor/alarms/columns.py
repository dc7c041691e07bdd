"""Columns of a row that one alarm judges, the values in them, and the figures of a finding."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.row import Layout
from normscope.probes import Measurement
from normscope.rules import Finding, Hit, Record, Severity

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_BITS = np.uint64(0x7FF8_0000_4E6F_6E65)
NOT_MEASURED = float(_BITS.view(np.float64))
"""The NaN of a column that a step did not measure, as R's NA: one payload, which copies and stores keep.

Any other NaN is a value that went wrong.
"""


def is_measured(values: Floats) -> Mask:
    """Mask of the values that are not `NOT_MEASURED`."""
    return np.asarray(np.ascontiguousarray(values).view(np.uint64) != _BITS)


@dataclass(frozen=True)
class Look:
    """A row, as the alarms see it.

    Attributes:
        step, rank: of the row.
        values: [columns], not finite where `usable` is False.
        usable: [columns], measured, finite and no garbage.
        measured: [columns].
        lr: last known learning rate of this rank, None where none was measured.
        path: sum of the learning rates of all steps so far; a step without a known rate counts as 1.
        among: " on rank 3" for a sentence, where there are several; else "".
    """

    step: int
    rank: int
    values: Floats
    usable: Mask
    measured: Mask
    lr: float | None = None
    path: float = 0.0
    among: str = ""


class Columns:
    """The columns of some quantities in a layout, in the order of the layout."""

    def __init__(self, layout: Layout, quantities: Collection[str] | None = None) -> None:
        """Pick the columns of `quantities`; all where that is None."""
        numbers = [i for i, (name, _) in enumerate(layout) if quantities is None or name in quantities]
        self.numbers = np.array(numbers, dtype=np.intp)
        self.names = [layout[i] for i in numbers]

    def __len__(self) -> int:
        return len(self.names)

    def sites(self, chosen: Mask) -> tuple[str, ...]:
        """Sites of the chosen columns, each once; the whole model has none."""
        return tuple(dict.fromkeys(self.names[i][1] for i in np.flatnonzero(chosen) if self.names[i][1]))

    def title(self, column: int) -> str:
        """Name of a column for a sentence: "stream/rms at blocks.3" or "loss"."""
        quantity, site = self.names[column]
        return f"{quantity} at {site}" if site else quantity

    def evidence(self, look: Look, columns: Iterable[int], how: str) -> tuple[Measurement, ...]:
        """The values of columns at a step, as measurements."""
        values = look.values[self.numbers]
        return tuple(
            Measurement(*self.names[i], float(values[i]), how=f"step {look.step}; {how}") for i in columns
        )

    def raised(
        self, record: Record, look: Look, chosen: Mask, worst: int, severity: Severity, said: str, how: str
    ) -> Finding:
        """The finding of an alarm.

        Args:
            chosen: [columns of this] the series that raise it.
            worst: the column that the sentence is about.
            said: the sentence after "At step 3, loss ", without the full stop.
            how: where the evidence comes from.
        """
        others = int(chosen.sum()) - 1
        also = (
            f" {others} other series as well." if others > 1 else " 1 other series as well." if others else ""
        )
        message = f"At step {look.step}{look.among}, {self.title(worst)} {said}.{also}"
        first = [worst, *(int(i) for i in np.flatnonzero(chosen) if i != worst)][:MOST_EVIDENCE]
        return record.finding(Hit(severity, self.sites(chosen), message, self.evidence(look, first, how)))


MOST_EVIDENCE = 8
"""Measurements in the evidence of one alarm; its sites are all named."""
