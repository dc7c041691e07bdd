"""Recorder: what becomes of the figures of a step that has ended."""

from collections.abc import Callable

from normscope.monitor import step_figures
from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.entropy import RunEntropy
from normscope.monitor.instruments import Instruments
from normscope.monitor.journal import Journal
from normscope.monitor.row import SITES, STEP, Event, Row
from normscope.monitor.taken import Taken
from normscope.monitor.tracer import Tracer
from normscope.rules import Finding


class Recorder:
    """Tracer of the wrong values of steps, whose figures it hands to the journal.

    The numbers of a late step lie on a device. They are read at the next step, so that the host never waits.

    Args:
        instruments: those that took the figures.
        tracer: search for wrong values.
        journal: it judges the figures, and stores them.
        entropy: search for the entropy of the targets.
        on_alarm: called with each new alarm and its step.
        on_wrong: called with each event of a first wrong value.
    """

    def __init__(
        self,
        instruments: Instruments,
        tracer: Tracer,
        journal: Journal,
        entropy: RunEntropy,
        on_alarm: Callable[[Finding, int], object],
        on_wrong: Callable[[Event], object],
    ) -> None:
        self._instruments, self._tracer, self._journal = instruments, tracer, journal
        self._entropy, self._on_alarm, self._on_wrong = entropy, on_alarm, on_wrong
        self._waiting: Taken | None = None
        self._alarms: list[Finding] = []  # of late steps, since the last call of `record`

    def before_update(self, taken: Taken) -> None:
        """Trace what is wrong before an update changes the weights."""
        if (event := self._tracer.before_update(taken)) is not None:
            self._on_wrong(event)

    def record(self, taken: Taken, *, is_late: bool) -> list[Finding]:
        """Record a step that has ended; the alarms since the last call."""
        self.record_waiting()
        if is_late:
            taken.send()
            self._waiting = taken
        else:
            self._alarms += self._record(taken)
        new, self._alarms = self._alarms, []
        return new

    def record_waiting(self) -> None:
        """Record the late step before, if there is one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._alarms += self._record(waiting)
            waiting.forget()

    def forget(self) -> None:
        """Drop the late step."""
        if self._waiting is not None:
            self._waiting.forget()
        self._waiting = None

    def _record(self, taken: Taken) -> list[Finding]:
        """Read the numbers of a step, trace what is wrong, judge and store; its new alarms."""
        taken.receive()
        loss = NOT_MEASURED if taken.loss is None else float(taken.loss)
        for event in self._tracer.after_update(taken, loss):
            self._on_wrong(event)
        self._entropy.see(taken)
        rows = self._rows(taken, loss)
        new = self._journal.judge(rows)
        for event in self._tracer.at_alarms(taken, new):
            self._on_wrong(event)
        new += self._journal.keep(rows, new, with_sites=taken.is_due)
        for finding in new:
            self._on_alarm(finding, taken.step)
        return new

    def _rows(self, taken: Taken, loss: float) -> list[Row]:
        """The figures of every step, and those that were due."""
        values = step_figures.values_of(taken, loss, self._instruments.plan, self._instruments.streams)
        rows = [Row(taken.step, self._journal.rank, taken.time, STEP, values)]
        if taken.measured is not None:
            rows.append(Row(taken.step, self._journal.rank, taken.time, SITES, taken.measured))
        return rows
