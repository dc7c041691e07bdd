"""NS810 and NS811: branches that die, and gains that decay."""

from collections.abc import Iterator

import numpy as np

from normscope.forecast.thresholds import TRANSIENT
from normscope.monitor.alarms.columns import Columns, Floats, Look
from normscope.monitor.alarms.episodes import Episodes
from normscope.monitor.alarms.looks import APART, Looks
from normscope.monitor.row import Layout
from normscope.rules import Finding, Record, Severity, alarm, figure
from normscope.rules.signal import DECLINE, DECLINE_FALL

BLOCK = 20
"""Values whose median is a series' own earlier level."""
CONFIRMED = 5
"""Values in a row under the threshold."""
HALF = 0.5
"""Share of its earlier level to which a gain must fall."""

BRANCH_DIES = alarm(
    "NS810",
    "branch-dies",
    summary="A branch that used to change the stream hardly does so any more.",
    why="""A branch is judged against its own past: its output over the stream that it is added to. Where that
        falls to a small share, the layer computes and the stream passes by: dead units, a gain that went to
        zero, or a stream that has outgrown its branches (NS807).""",
    threshold=f"""Update ratio under {DECLINE:g} and under {DECLINE_FALL:g} of the largest median of {BLOCK}
        earlier values, {CONFIRMED} values in a row, {APART} steps apart or more. The first {TRANSIENT} steps
        do not count.""",
    source="Our own thresholds of NS204 (docs/thresholds.md), over time instead of depth.",
    remedy="""Look at the branch's gains and biases and at its gradient; at the stream's size (NS807). Then a
        norm on the branch's output, or a lower learning rate.""",
)
GAINS_DECAY = alarm(
    "NS811",
    "gains-decay",
    summary="Norm gains shrink towards zero, step by step.",
    why="""Decoupled weight decay multiplies a gain by 1 − ηλ at every step. Where no gradient holds it the
        gain falls to zero, and the branch or the head behind it with it.""",
    threshold=f"""RMS of the gains under {HALF:g} of the largest median of {BLOCK} earlier values, {CONFIRMED}
        values in a row, {APART} steps apart or more. The first {TRANSIENT} steps do not count.""",
    source="""Loshchilov and Hutter 2017, arXiv:1711.05101; closed form e^(−ηλn): one half in 0.69/(ηλ) steps,
        as in NS711. The share is our own choice.""",
    remedy="Give gains, biases and scalars a parameter group with weight_decay=0 (NS711).",
)


class Decline:
    """Judge of series that fall far under their own earlier level.

    Args:
        share: share of the earlier level under which a value counts.
        ceiling: value under which it counts.
    """

    def __init__(
        self, layout: Layout, record: Record, quantities: frozenset[str], share: float, ceiling: float
    ) -> None:
        self._record, self._share, self._ceiling = record, share, ceiling
        self.columns = Columns(layout, quantities)
        self._looks = Looks(len(self.columns), BLOCK)
        self._level: Floats = np.zeros(len(self.columns))
        self._entered = 0
        self._episodes = Episodes(len(self.columns))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        values, usable = look.values[self.columns.numbers], look.usable[self.columns.numbers]
        if not self._looks.enter(look, values, usable):
            return
        if look.step - (self._looks.first_step or 0) < TRANSIENT:
            return
        self._entered += 1
        held = self._looks.values
        limit = np.minimum(self._ceiling, self._share * self._level)
        low = (self._looks.run >= CONFIRMED) & (held[:, -CONFIRMED:] < limit[:, None]).all(axis=1)
        if self._entered % BLOCK == 0:
            full = self._looks.run >= BLOCK
            self._level[full] = np.maximum(self._level[full], np.median(held[full], axis=1))
        if (new := self._episodes.update(low, usable)) is None:
            return
        worst = int(np.argmin(np.where(new, values / np.maximum(self._level, 1e-300), np.inf)))
        level = figure(self._level[worst])
        said = f"has fallen to {figure(values[worst])} from a median of {level}"
        how = f"its largest earlier median is {level}"
        yield self.columns.raised(self._record, look, new, worst, Severity.WARNING, said, how)


def branches(layout: Layout) -> Decline:
    """The judge of branches."""
    return Decline(layout, BRANCH_DIES, frozenset({"branch/update-ratio"}), DECLINE_FALL, DECLINE)


def gains(layout: Layout) -> Decline:
    """The judge of gains."""
    return Decline(layout, GAINS_DECAY, frozenset({"gain/rms"}), HALF, np.inf)
