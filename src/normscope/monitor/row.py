"""Rows, alarms and events: the record of a run, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.rules import Finding

NOISE = "diversity-with-noise"
"""Name of the noted fact that the diversities of a run hold dropout's noise; its value says why."""

Layout = tuple[tuple[str, str], ...]
"""(quantity, site) of each value of a row; the site "" is the whole model."""
STEP, SITES = "step", "sites"
"""Names of the two layouts: figures of every step, and figures of every site at some steps."""

PARTS = frozenset({"gradient/norm", "gradient/block", "gradient/kind", "weight/norm", "gain/rms"})
"""Figures of which each rank has a part where the weights are sharded: their squares add up."""

GARBAGE = 1e18
"""Size from which a finite value is garbage: its square overflows float32 soon (√3.4e38 = 1.8e19)."""


@dataclass(frozen=True, eq=False)
class Row:
    """Figures of one step.

    Attributes:
        step: optimizer step, from 1.
        rank: rank of the process; 0 in a run of one process.
        time: seconds since the epoch.
        layout: name of the layout, `STEP` or `SITES`.
        values: [columns of the layout] float64; may be NaN or infinite.
    """

    step: int
    rank: int
    time: float
    layout: str
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Raised:
    """An alarm that was raised.

    Attributes:
        step: optimizer step.
        rank: rank of the process.
        time: seconds since the epoch.
        finding: what it says.
        attempt: number of times that the run was resumed before.
    """

    step: int
    rank: int
    time: float
    finding: Finding
    attempt: int = 0


FIRST_WRONG_VALUE = "first-wrong-value"
"""Kind of the event that holds the first wrong value; its data has a "sentence" and more."""
RESCUE = "rescue"
"""Kind of the event of something that a rescue did; its data has an "action", a "sentence" and figures."""
SNAPSHOTS_KEPT = "snapshots"
"""Kind of the event that states the memory of a rescue's snapshots."""
LOOK = "look"
"""Kind of the event of a look at the model; its data has a "sentence", and "findings" unless it failed."""
RANKS = "ranks"
"""Kind of the event that says which ranks are not compared with the others."""


@dataclass(frozen=True)
class Event:
    """Something that happened to the run or to its monitor.

    Attributes:
        step: optimizer step.
        rank: rank of the process.
        time: seconds since the epoch.
        kind: `FIRST_WRONG_VALUE`, `RESCUE`, `LOOK`, "monitor-failed", …
        data: details that JSON can hold.
        attempt: number of times that the run was resumed before.
    """

    step: int
    rank: int
    time: float
    kind: str
    data: Mapping[str, Any]
    attempt: int = 0

    @property
    def sentence(self) -> str:
        """The event's own sentence, or its data."""
        said = self.data.get("sentence")
        if isinstance(said, str):
            return said
        return ", ".join(f"{name}: {value}" for name, value in self.data.items())
