"""Journal: the rows, alarms and events of a run on one rank, as they come."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from normscope.capture.alone import num_processes
from normscope.monitor.alarms import Judges
from normscope.monitor.row import RANKS, Event, Layout, Raised, Row
from normscope.monitor.store import RunStore
from normscope.monitor.together import UNSTORED, Together
from normscope.monitor.trackers import Trackers
from normscope.rules import Finding


class Journal:
    """Judge of rows, which it hands on to trackers and writes to the store every few steps, with all alarms.

    Args:
        store: the store; None keeps alarms and notes only.
        trackers: objects that get the figures of each step.
        facts: facts of the run that alarms need, see `Judges`; they may change.
        rank: rank of this process.
        every: steps between two writes; an alarm or an event is written at once.
        start: number of steps before.

    Attributes:
        alarms: every alarm so far.
        notes: sentences on what is not watched, and why.
        judges: the alarms' judges.
        rank: rank of this process.
    """

    def __init__(
        self,
        store: RunStore | None,
        trackers: Trackers,
        facts: Mapping[str, Any],
        *,
        rank: int,
        every: int,
        start: int,
    ) -> None:
        self.alarms: list[Raised] = []
        self.notes: list[str] = []
        self.judges = Judges(facts)
        self.rank, self._store, self._trackers, self._every = rank, store, trackers, every
        self._layouts: dict[str, Layout] = {}
        self._rows: list[Row] = []
        self._events: list[Event] = []
        self._unstored = 0
        self._together: Together | None = None
        if rank == 0 and num_processes() > 1:
            if store is None:
                self.notes.append(UNSTORED)
            else:
                began = time.time()
                self._together = Together(
                    store.path, num_processes(), start=start, began=began, every=every, facts=facts
                )

    def declare(self, layouts: Mapping[str, Layout]) -> None:
        """Name the columns of the rows to come."""
        self._layouts = dict(layouts)
        if self._store is not None:
            for name, layout in layouts.items():
                self._store.declare(name, layout)

    def note(self, name: str, value: Any) -> None:
        """Store a fact of the run under a name."""
        if self._store is not None:
            self._store.note(name, value)

    def remark(self, *sentences: str) -> None:
        """Add sentences to the notes on what is not watched."""
        self.notes.extend(sentences)
        self.note("notes", self.notes)

    def enter(self, *events: Event) -> None:
        """Keep events for the next write."""
        self._events.extend(events)

    def judge(self, rows: Sequence[Row]) -> list[Finding]:
        """Alarms that the rows of a step raise."""
        return [
            finding
            for row in rows
            for finding in self.judges.feed(row.step, self._layouts[row.layout], row.values)
        ]

    def keep(self, rows: Sequence[Row], findings: Sequence[Finding], *, with_sites: bool) -> list[Finding]:
        """Keep the rows of a step with their alarms; alarms on differences of the ranks.

        Args:
            rows: of one step, at least one.
            findings: the alarms that `judge` gave.
            with_sites: whether trackers get the figures of single sites too.
        """
        step, moment = rows[0].step, rows[0].time
        raised = [Raised(step, self.rank, moment, finding) for finding in findings]
        self.alarms += raised
        self._rows += rows
        self._unstored += 1
        new: list[Finding] = []
        if self._unstored >= self._every or raised or self._events:
            self.flush(raised)
            new = self.compared(step)
        figures = [(self._layouts[row.layout], row.values) for row in rows]
        self._trackers.log(step, figures, with_sites=with_sites)
        return new

    def flush(self, raised: Sequence[Raised] = ()) -> None:
        """Write what is not stored yet."""
        if self._store is not None:
            self._store.add(self._rows, raised, self._events)
        self._rows, self._events, self._unstored = [], [], 0

    def drop(self) -> None:
        """Forget what could not be written, but for the last event."""
        self._rows, self._events = [], self._events[-1:]

    def compared(self, step: int) -> list[Finding]:
        """Alarms on differences of the ranks, by what they have stored; on rank 0, stored at once."""
        if self._together is None or self._store is None:
            return []
        raised = self._together.compared()
        said, self._together.sentences = self._together.sentences, []
        moment = time.time()
        events = [Event(step, self.rank, moment, RANKS, {"sentence": sentence}) for sentence in said]
        if raised or events:
            self.alarms += raised
            self._store.add((), raised, events)
            self.remark(*said)
        return [each.finding for each in raised]

    def end(self, reason: str) -> None:
        """Note the end of the run; a `reason` is that of a failure."""
        if self._store is not None:
            self._store.end(reason)

    def close(self) -> None:
        """Close the store; what was not flushed is lost."""
        if self._together is not None:
            self._together.close()
        if self._store is not None:
            self._store.close()
