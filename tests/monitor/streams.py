"""Streams of rows for the alarms: one series, or several, fed to `Judges`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normscope.monitor.alarms import Judges
from normscope.rules import Finding

Series = Mapping[str, Sequence[float] | np.ndarray]


def raised(
    series: Series, *, every: int = 1, notes: Mapping[str, Any] | None = None, judges: Judges | None = None
) -> list[tuple[int, Finding]]:
    """(step, finding) of every alarm over `series`, "quantity" or "quantity@site" → a value a row.

    Args:
        every: steps between two rows.
    """
    layout = tuple((name.partition("@")[0], name.partition("@")[2]) for name in series)
    judges = judges or Judges(notes)
    rows = np.column_stack([np.asarray(values, dtype=float) for values in series.values()])
    steps = range(every, every * (len(rows) + 1), every)
    return [
        (step, each) for step, row in zip(steps, rows, strict=True) for each in judges.feed(step, layout, row)
    ]


def codes(series: Series, **options: Any) -> list[str]:
    """Codes of the alarms over `series`."""
    return [finding.code for _, finding in raised(series, **options)]
