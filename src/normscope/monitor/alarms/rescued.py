"""NS816: a rescue that skips too much."""

from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Look
from normscope.monitor.alarms.episodes import Episode
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm

TAKEN, RESCUED, GAVE_UP = 0.0, 1.0, 2.0
"""Values of the quantity "rescued": the step was taken; it was skipped, or the run went back; the run should
have gone back, and the rescue has given that up."""
RESCUES, WITHIN = 5, 100
"""Rescued steps among the last ones."""

RESCUED_OFTEN = alarm(
    "NS816",
    "rescued-often",
    summary="Many of the last steps were skipped by the rescue, or it has given up going back.",
    why="""A rescue is for the odd batch. Where it passes over batch after batch, the cause is another one: a
        weight or an optimizer state is wrong, the learning rate is too high, or the data is broken. Steps
        without an update cost as much as the others and teach nothing.""",
    threshold=f"""{RESCUES} of the last {WITHIN} steps skipped by the rescue or given up for an earlier state;
        a step in which it gives up going back. Clipped steps do not count, nor do those that a GradScaler
        skips (NS803).""",
    source="""PaLM, arXiv:2204.02311, section 5.1: about 20 spikes with 200 to 500 batches passed over each,
        in 255,000 steps: 3 in 100. The next larger share is our own choice.""",
    remedy="""Read the reasons in the events of the kind "rescue". Not finite in every step: the first wrong
        value names the cause. Jumps: lower the learning rate, lengthen the warm-up, look at the batches.""",
)


class Rescued:
    """Judge of the steps that a rescue did not take."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout, {"rescued"})
        self._last = np.zeros((len(self.columns), WITHIN), dtype=bool)
        self._rows = 0
        self._episodes = Episode()

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        numbers = self.columns.numbers
        values = np.where(look.usable[numbers], look.values[numbers], TAKEN)
        self._last[:, self._rows % WITHIN] = values != TAKEN
        self._rows += 1
        rescues, gave_up = self._last.sum(axis=1), values == GAVE_UP
        if (new := self._episodes.update((rescues >= RESCUES) | gave_up)) is None:
            return
        worst = int(np.argmax(rescues + WITHIN * gave_up))
        said = f"says that {rescues[worst]} of the last {min(self._rows, WITHIN)} steps were not taken"
        if gave_up[worst]:
            said = "says that going back to an earlier state did not help"
        severity = Severity.ERROR if gave_up[worst] else Severity.WARNING
        how = "1 for a step that was skipped or given up, 2 where going back was given up"
        yield self.columns.raised(RESCUED_OFTEN, look, new, worst, severity, said, how)
