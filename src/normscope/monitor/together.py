"""Comparison of the ranks of a run, from the rows that all of them write to one store.

No rank waits for another: rank 0 reads what the others have written when it writes itself. A step is compared
once every rank has written it or a later one, or is too far behind.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import describe
from normscope.monitor.alarms import NOT_MEASURED, is_measured
from normscope.monitor.alarms.columns import Floats, Look
from normscope.monitor.alarms.episodes import Episode
from normscope.monitor.alarms.ranks import OF_WEIGHTS, Ranks
from normscope.monitor.row import GARBAGE, SITES, STEP, Layout, Raised
from normscope.monitor.store import RunReader
from normscope.rules import Finding

BEHIND, FLUSHES = 100, 5
"""Steps, and writes of rank 0, that a rank may be behind before the others are compared without it."""
UNSTORED = "ranks are not compared: that needs a store that all of them write on one machine"


class Together:
    """Reader of the rows of all ranks, and judge of their differences.

    Args:
        path: the store that all ranks write.
        size: number of ranks.
        start: last step before this attempt of the run.
        began: time of its begin, in seconds since the epoch; older rows are of another attempt.
        every: steps between two writes.
        facts: notes on the run, see `Judges`.

    Attributes:
        sentences: what is not compared, and why, since the caller has last emptied it.
    """

    def __init__(
        self, path: Path, size: int, *, start: int, began: float, every: int, facts: Mapping[str, Any]
    ) -> None:
        self._reader = RunReader(path)
        self._start, self._began = start, began
        self._behind = max(BEHIND, FLUSHES * every)
        self._facts = facts
        here = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        self._ranks = range(here)
        self._left: set[int] = set()
        self._versions: dict[int, tuple[float, int]] = {}
        parted = Episode()
        self._of = {name: _Steps(name, start, facts, parted) for name in (STEP, SITES)}
        self._is_over = False
        self.sentences: list[str] = []
        if here < size:
            self.sentences.append(
                f"on other machines, not compared with the rest: {_ranks(range(here, size))}"
            )

    def close(self) -> None:
        """Close the store."""
        self._reader.close()

    def compared(self) -> list[Raised]:
        """Alarms of the rows that came since the last call. An error ends the comparison, with a sentence."""
        if self._is_over:
            return []
        try:
            return [Raised(step, 0, time.time(), finding) for step, finding in self._look()]
        except Exception as error:
            self._is_over = True
            self.sentences.append(f"ranks are no longer compared: {describe(error)}")
            return []

    def _look(self) -> list[tuple[int, Finding]]:
        with self._reader.one_moment():
            self._find_restarts()
            newest = self._of[STEP].read(self._reader, 0, None, self._began)
            for rank in self._ranks:
                for steps in self._of.values():
                    steps.read(self._reader, rank, newest, self._began)
        self._left -= {rank for rank in self._left if self._of[STEP].last[rank] >= newest - self._behind // 2}
        ready = []
        for number, steps in enumerate(self._of.values()):
            self._leave(steps.behind(self._ranks, newest - self._behind) - self._left)
            left = [rank for rank in self._ranks if rank not in self._left]
            ready += [(step, number, steps) for step in steps.ready(left)]
        ready.sort(key=lambda each: each[:2])
        return [(step, finding) for step, _, steps in ready for finding in steps.judge(step)]

    def _find_restarts(self) -> None:
        """Forget what was read where a rank has begun anew or has gone back to an earlier step."""
        versions = {each.rank: (each.began, each.rewinds) for each in self._reader.ranks()}
        again = [rank for rank, version in self._versions.items() if versions.get(rank, version) != version]
        self._versions = versions
        if again:
            for name, steps in self._of.items():
                last = {rank: self._reader.last_step_of(rank, name) or self._start for rank in again}
                self._of[name] = steps.anew(last)

    def _leave(self, ranks: set[int]) -> None:
        """Compare the others without these ranks from now on, until they have caught up."""
        self._left |= ranks
        last = {rank: self._of[STEP].last.get(rank, self._start) for rank in ranks}
        if silent := sorted(rank for rank in ranks if last[rank] == self._start):
            have = "has" if len(silent) == 1 else "have"
            self.sentences.append(f"{_ranks(silent)} {have} written no row to this store: not compared")
        self.sentences += [
            f"rank {rank} has written no row after step {last[rank]}: not compared since"
            for rank in sorted(ranks - set(silent))
        ]


class _Steps:
    """Rows of one name that are not compared yet, by step and rank."""

    def __init__(self, name: str, start: int, facts: Mapping[str, Any], parted: Episode) -> None:
        self._name, self._start, self._facts, self._parted = name, start, facts, parted
        self._layout: Layout = ()
        self._columns: dict[int, NDArray[np.intp] | None] = {}
        self._judge: Ranks | None = None
        self._waiting: dict[int, dict[int, Floats]] = {}
        self.last: dict[int, int] = {}
        """Last step that was read of each rank."""
        self.compared = start

    def anew(self, last: Mapping[int, int]) -> "_Steps":
        """The same without history; the rows of some ranks are read from their last steps on."""
        new = _Steps(self._name, self._start, self._facts, self._parted)
        new.last = {**self.last, **last}
        new.compared = min(new.last.values(), default=self._start)
        return new

    def read(self, reader: RunReader, rank: int, until: int | None, began: float) -> int:
        """Read the new rows of a rank up to a step; the last step that was read.

        Rank 0 comes first: its columns are those that are compared.
        """
        last = self.last.get(rank, self._start)
        for step, moment, layout, values in reader.rows(rank, self._name, after=last, until=until):
            last = step
            if moment >= began and step > self.compared:
                self._waiting.setdefault(step, {})[rank] = self._fitted(reader, layout, values)
        self.last[rank] = last
        return last

    def _fitted(self, reader: RunReader, layout: int, values: Floats) -> Floats:
        """The values in the order of rank 0's columns."""
        if layout not in self._columns:
            columns = reader.layout(layout)
            if not self._layout:
                self._layout, self._judge = columns, Ranks(columns, self._facts, self._parted)
            self._columns[layout] = self._places(columns)
        found = self._columns[layout]
        return values if found is None else np.where(found < 0, NOT_MEASURED, values[found])

    def _places(self, columns: Layout) -> NDArray[np.intp] | None:
        """Place of each of rank 0's columns in others, -1 where it is not there; None if they are alike.

        Where ranks hold different parts of a model, as stages of a pipeline, their weights are not compared.
        """
        if columns == self._layout:
            return None
        places = {column: number for number, column in enumerate(columns)}
        if _of_weights(columns) != _of_weights(self._layout):
            places = {column: number for column, number in places.items() if column[0] not in OF_WEIGHTS}
        return np.array([places.get(each, -1) for each in self._layout], dtype=np.intp)

    def behind(self, ranks: Iterable[int], limit: int) -> set[int]:
        """Ranks that have written neither a step that waits, up to `limit`, nor a later one."""
        old = [step for step in self._waiting if step <= limit]
        return {rank for rank in ranks for step in old if self.last[rank] < step}

    def ready(self, ranks: list[int]) -> list[int]:
        """Steps that wait and that all of `ranks` have written or passed."""
        until = min((self.last[rank] for rank in ranks), default=self._start)
        return [step for step in self._waiting if step <= until]

    def judge(self, step: int) -> Iterator[Finding]:
        """Compare a step, which no longer waits."""
        rows, self.compared = self._waiting.pop(step), step
        if len(rows) < 2 or self._judge is None:
            return
        ranks = sorted(rows)
        values = np.stack([rows[rank] for rank in ranks])
        measured = is_measured(values)
        with np.errstate(invalid="ignore"):
            usable = measured & (np.abs(values) <= GARBAGE)
        yield from self._judge.judge(
            [Look(step, rank, *each) for rank, *each in zip(ranks, values, usable, measured, strict=True)]
        )


def _of_weights(layout: Layout) -> set[tuple[str, str]]:
    return {column for column in layout if column[0] in OF_WEIGHTS}


def _ranks(numbers: Iterable[int]) -> str:
    """Their names, as "ranks 4 to 7"."""
    known = sorted(numbers)
    if len(known) > 2 and known[-1] - known[0] == len(known) - 1:
        return f"ranks {known[0]} to {known[-1]}"
    return f"rank{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}"
