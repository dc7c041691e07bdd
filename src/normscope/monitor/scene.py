"""Scene: what `normscope watch` shows of a run at one moment, read from its store.

It uses these notes on the run, if they are there: "model" (a description), "entropy" (of the targets, in
nats), "steps" (planned), "every" (steps between two rows of all sites). It uses these quantities of the whole
model: loss, lr, seconds and tokens (of one step).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import UsageError, suggest
from normscope.monitor.against import Comparison, Rival
from normscope.monitor.alarms import is_measured
from normscope.monitor.grids import Grids
from normscope.monitor.row import FIRST_WRONG_VALUE, Event, Layout, Raised, Row
from normscope.monitor.store import Grid, RankState, RunReader
from normscope.report.report import strict

DEFAULT_QUANTITY = "stream/rms"
COLOURS = ("#7a5fb5", "#5e6fc4", "#4a8fc7", "#31a9b0", "#3bbf8a", "#7ad151", "#bddf26", "#fde725")
"""Colours of a heat map from low to high; they grow lighter, so that no hue has to be told from another."""
RECENT = 20  # steps whose time is averaged
LEAST_SILENCE = 10.0  # seconds without a write before a run is called silent
FLUSHES = 3  # expected flushes without a write before a run is called silent


@dataclass(frozen=True)
class Scene:
    """A run at one moment.

    Attributes:
        path: its store.
        notes: its notes.
        ranks: state of each rank.
        rank: the rank whose loss, heat map and speed these are.
        state: "running", "silent" (it has not written for long), "gone" (its process died without an end),
            "ended" or "failed".
        reason: reason of a failure, else "".
        silence: seconds since the last write of the rank that is silent longest; 0 after the end.
        last: last row of each layout of each rank, with the layout.
        loss: loss by step; None before the first.
        heat: quantity by step and site; None if there is none.
        quantity: name of the quantity of `heat`, "" if there is none.
        quantities: names of all quantities that have sites.
        alarms: alarms of all ranks, newest last.
        wrong: the first wrong value, of the last attempt that has one; None if there was none.
        events: other events, newest last.
        step_seconds: median of the last steps; None if unknown.
        tokens_per_second: mean of the last steps; None if unknown.
        against: the comparison with another run, where one was asked for.
    """

    path: Path
    notes: Mapping[str, Any]
    ranks: tuple[RankState, ...]
    rank: int
    state: str
    reason: str
    silence: float
    last: tuple[tuple[Row, Layout], ...]
    loss: Grid | None
    heat: Grid | None
    quantity: str
    quantities: tuple[str, ...]
    alarms: tuple[Raised, ...]
    wrong: Event | None
    events: tuple[Event, ...]
    step_seconds: float | None
    tokens_per_second: float | None
    against: Comparison | None = None

    @property
    def last_step(self) -> int | None:
        """Last step of any rank; None before the first."""
        return max((row.step for row, _ in self.last), default=None)

    @property
    def is_over(self) -> bool:
        """True if the run has ended or failed."""
        return self.state in ("ended", "failed")

    def last_step_of(self, rank: int) -> int | None:
        """Last step that a rank has written; None before its first."""
        return max((row.step for row, _ in self.last if row.rank == rank), default=None)

    def figure(self, quantity: str) -> float | None:
        """Last value of a quantity of the whole model on `rank`; None if the last row lacks it."""
        found = (
            float(value)
            for row, layout in self.last
            if row.rank == self.rank
            for column, value, is_known in zip(layout, row.values, is_measured(row.values), strict=True)
            if column == (quantity, "") and is_known
        )
        return next(found, None)

    def to_dict(self) -> dict[str, Any]:
        """The scene as JSON can hold it; a figure that is not finite is "nan", "inf" or "-inf"."""
        return strict(
            {
                "schema": "normscope.watch/1",
                "store": str(self.path),
                "state": self.state,
                "reason": self.reason,
                "silence": round(self.silence, 3),
                "last_step": self.last_step,
                "notes": dict(self.notes),
                "rank": self.rank,
                "ranks": [
                    {
                        "rank": each.rank,
                        "state": "gone" if each.is_gone else each.state,
                        "last_step": self.last_step_of(each.rank),
                        "attempt": each.attempt,
                        "began": each.began,
                        "seen": each.seen,
                    }
                    for each in self.ranks
                ],
                "first_wrong_value": None if self.wrong is None else of_event(self.wrong),
                "alarms": [_of_record(alarm) | alarm.finding.to_dict() for alarm in self.alarms],
                "events": [of_event(event) for event in self.events],
                "against": None if self.against is None else self.against.to_dict(),
                "last_rows": [
                    {
                        "step": row.step,
                        "rank": row.rank,
                        "time": row.time,
                        "layout": row.layout,
                        "values": [
                            {"quantity": quantity, "site": site, "value": float(value)}
                            for (quantity, site), value in zip(layout, row.values, strict=True)
                        ],
                    }
                    for row, layout in self.last
                ],
            }
        )


class Watcher:
    """Reader of scenes of one run; it reads only the rows that it has not read before.

    Args:
        path: the run's store.
        quantity: the quantity of `Scene.heat`; None for `DEFAULT_QUANTITY`, or another if the run lacks it.
        rank: rank whose loss, heat map and speed are read; None for the first that the store holds, and for
            the whole model where its weights are sharded.
        against: store of a run to compare with.
    """

    def __init__(
        self,
        path: Path,
        quantity: str | None = None,
        rank: int | None = None,
        against: Path | None = None,
    ) -> None:
        self.path, self.quantity, self.rank = path, quantity, rank
        self._rival = None if against is None else Rival(against, whole=rank is None)
        self._grids = Grids(whole=rank is None)

    @property
    def version(self) -> Any:
        """Changes when rows that were read may no longer be in the stores."""
        return self._grids.version, self._rival and self._rival.version

    def look(self, reader: RunReader | None = None) -> Scene:
        """The run at this moment.

        Args:
            reader: reader of the store in its `one_moment`, whose state is read; None opens one.

        Raises:
            UsageError: the store cannot be read, lacks the rank, or no row has the quantity at a site.
        """
        if reader is None:
            with RunReader(self.path) as own, own.one_moment():
                return self.look(own)
        ranks = reader.ranks()
        rank = self._chosen_rank(ranks)
        self._grids.look(reader)
        last = [pair for each in ranks for pair in reader.last_rows(each.rank)]
        known = _with_sites(reader, rank)
        quantity = self._chosen(known)
        step_seconds, speed = _pace(reader, rank, reader.last_step or 0)
        state, reason, silence = _state(ranks, step_seconds, reader.notes())
        events = reader.events()
        found = [event for event in events if event.kind == FIRST_WRONG_VALUE]
        wrong = min(found, key=_order, default=None)
        return Scene(
            path=self.path,
            notes=reader.notes(),
            ranks=tuple(ranks),
            rank=rank,
            state=state,
            reason=reason,
            silence=silence,
            last=tuple(last),
            loss=self._grids.grid(reader, "loss", rank),
            heat=self._grids.grid(reader, quantity, rank) if quantity else None,
            quantity=quantity,
            quantities=tuple(known),
            alarms=tuple(reader.alarms()),
            wrong=wrong,
            events=tuple(event for event in events if event.kind != FIRST_WRONG_VALUE),
            step_seconds=step_seconds,
            tokens_per_second=speed,
            against=self._compared(reader, quantity, rank),
        )

    def _compared(self, reader: RunReader, quantity: str, rank: int) -> Comparison | None:
        return None if self._rival is None else self._rival.compared(reader, self._grids, quantity, rank)

    def _chosen_rank(self, ranks: list[RankState]) -> int:
        known = [each.rank for each in ranks]
        if self.rank is None:
            return known[0] if known else 0
        if self.rank not in known:
            expected = f"one of {', '.join(map(str, known))}" if known else "a run that has begun"
            raise UsageError(f"--rank {self.rank}", expected, "choose a rank that the store holds")
        return self.rank

    def _chosen(self, known: list[str]) -> str:
        if self.quantity is None:
            return DEFAULT_QUANTITY if DEFAULT_QUANTITY in known else next(iter(known), "")
        if known and self.quantity not in known:
            do = suggest(self.quantity, known, "choose one")
            raise UsageError(f"--quantity {self.quantity}", f"one of {', '.join(known)}", do)
        return self.quantity


def _order(wrong: Event) -> tuple[int, int, int, float]:
    """Key of the first of several wrong values.

    A NaN that ranks exchange is seen by all; the one that made it knows more.
    """
    unknown = sum(name not in wrong.data for name in ("module", "kind"))
    return -wrong.attempt, wrong.step, unknown, wrong.time


def _with_sites(reader: RunReader, rank: int) -> list[str]:
    """Quantities that are measured at sites, and not for the whole model only."""
    return [quantity for quantity, sites in reader.columns(rank).items() if any(sites)]


def _state(
    ranks: list[RankState], step_seconds: float | None, notes: Mapping[str, Any]
) -> tuple[str, str, float]:
    """State of the run, reason of its failure and seconds without a write."""
    of = f" on rank {{}} of {len(ranks)}" if len(ranks) > 1 else ""
    for each in ranks:
        if each.state == "failed":
            return "failed", each.reason + of.format(each.rank), 0.0
    running = [each for each in ranks if each.state == "running"]
    if ranks and not running:
        return "ended", "", 0.0
    silence = max((max(0.0, time.time() - each.seen) for each in running), default=0.0)
    for each in running:
        if each.is_gone:
            return "gone", f"process {each.process.pid} no longer runs" + of.format(each.rank), silence
    every = notes.get("every", 10)
    flush = (step_seconds or 0.0) * (every if isinstance(every, int) else 10)
    return "silent" if silence > max(LEAST_SILENCE, FLUSHES * flush) else "running", "", silence


def _pace(reader: RunReader, rank: int, last: int) -> tuple[float | None, float | None]:
    """Median seconds of the last steps, and their tokens per second."""
    known = reader.columns(rank)
    if "seconds" not in known:
        return None, None
    seconds = _finite(reader.series("seconds", rank=rank, after=last - RECENT)[1])
    if not len(seconds):
        return None, None
    median = float(np.median(seconds))
    if "tokens" not in known or median <= 0:
        return median, None
    tokens = _finite(reader.series("tokens", rank=rank, after=last - RECENT)[1])
    return median, float(np.mean(tokens) / np.mean(seconds)) if len(tokens) else None


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _of_record(record: Raised | Event) -> dict[str, Any]:
    return {"step": record.step, "rank": record.rank, "time": record.time, "attempt": record.attempt}


def of_event(event: Event) -> dict[str, Any]:
    """The event as plain data."""
    return _of_record(event) | {"kind": event.kind, "data": dict(event.data)}
