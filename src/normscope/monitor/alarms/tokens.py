"""NS808 and NS809: tokens that collapse late, and a loss that stays at the unigram entropy."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from normscope.forecast.thresholds import DEAD, LEARNT, LONG, SUNK, TRANSIENT
from normscope.monitor.alarms.columns import Columns, Look
from normscope.monitor.alarms.episodes import Episode
from normscope.monitor.alarms.looks import APART, Looks
from normscope.monitor.alarms.window import SIGMA, middle
from normscope.monitor.entropy import STEPS
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm, figure

CONFIRMED = 2
"""Values in a row under the threshold."""
BELOW = 2.0
"""Standard errors under the entropy from which a loss must have learnt context: frequencies reach no less."""
FALL = LEARNT / 2
"""Fall between the medians of both halves of `LONG` steps under which a loss stands still."""

LATE_COLLAPSE = alarm(
    "NS808",
    "late-collapse",
    summary="The tokens of the last hidden state become equal while the run goes on.",
    why="""When all tokens of a sequence are equal, the head can learn frequencies and nothing else, and the
        gradient that would separate them is the difference of nearly equal numbers. Few runs recover. The
        diversity falls by decades while the loss still looks healthy.""",
    threshold=f"""Diversity ‖H − h̄‖²/‖H‖², reduced once more by its last fall, under {SUNK:g}, {CONFIRMED}
        times in a row at least {APART} steps apart: a warning. Under {DEAD:g} as it is: an error. Only where
        it has been above that limit before. Nothing is judged in the first {TRANSIENT} steps. Without token
        ids only {DEAD:g} counts. Dropout hides a collapse, because it gives equal tokens different masks. So
        where a forward draws random numbers, the diversity comes from a further forward in eval mode, at the
        steps with all figures. Where the model cannot be run again (it is compiled or sharded, communicates
        with other processes, or fails in eval mode), a note says so, and `normscope check run.db` calls a
        run without alarms "undecided".""",
    source="""Our own forecast's limits, docs/forecast-rule.md; what they rest on is beside them, in
        src/normscope/forecast/thresholds.py.""",
    remedy="""Go back to a checkpoint before the fall with a lower learning rate or a longer warm-up; use
        Pre-LN, or scale branches down (see NS202).""",
)
STUCK = alarm(
    "NS809",
    "stuck-at-unigram",
    summary="The loss stays at the entropy of the targets' frequencies.",
    why="""A model that ignores its context can reach the unigram entropy and no less. Every run passes it; a
        run that stays there has learnt frequencies and does not use its context.""",
    threshold=f"""Medians of both halves of the last {LONG} losses within {LEARNT:g} nats of the unigram
        entropy, a fall between them of less than {FALL:g}, and the later one not under the entropy by
        {BELOW:g} standard errors. The entropy is estimated from the targets of the first steps, {STEPS} at
        most, which the gradient of a cross-entropy shows, with the loss's label smoothing; or it is given to
        the Monitor as entropy=. Where it stays unknown nothing is judged, and `normscope check run.db` says
        why.""",
    source="""Our own forecast's constants, docs/forecast-rule.md; the smaller fall is our own choice,
        because a healthy run that passes the band of 0.2 nats falls by 0.1 in the same time.""",
    remedy="""Check that the context reaches the output (NS202, NS704, NS808), that targets and inputs belong
        together (NS712), and try a higher learning rate after a warm-up.""",
)


class Collapse:
    """Judge of the diversity of tokens in one layout: at the stacks' outputs, or the last column."""

    def __init__(self, layout: Layout, notes: Mapping[str, Any]) -> None:
        self.columns = Columns(layout, {"stream/diversity"})
        every = self.columns.names
        outputs = [pair for pair in every if pair[1].endswith(".hidden")] or every[-1:]
        self._judged = np.array([pair in outputs for pair in every], dtype=bool)
        self._limits = (DEAD, SUNK if notes.get("tokens", True) else 0.0)
        self._looks = Looks(len(self.columns), CONFIRMED + 1)
        self._largest = np.zeros(len(self.columns))
        self._step_of_largest = np.zeros(len(self.columns), dtype=np.int64)
        self._episodes = [Episode() for _ in self._limits]

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        values, usable = look.values[self.columns.numbers], look.usable[self.columns.numbers]
        larger = usable & (np.where(usable, values, 0.0) > self._largest)
        self._largest[larger], self._step_of_largest[larger] = values[larger], look.step
        if not self._looks.enter(look, values, usable):
            return
        start = self._looks.first_step or 0
        late = self._looks.steps - start >= TRANSIENT
        if not late[-CONFIRMED:].all():
            return
        held = self._looks.values
        before, now = held[:, :-1], held[:, 1:]
        sinks = now * np.minimum(1.0, now / np.maximum(before, 1e-300)) * late[:-1] + now * ~late[:-1]
        known = self._judged & (self._looks.run >= held.shape[1])
        dead = known & (now <= DEAD).all(axis=1)
        sunk = known & ~dead & (sinks < self._limits[1]).all(axis=1)
        dead, sunk = dead & (self._largest > DEAD), sunk & (self._largest >= self._limits[1])
        under = [f"under {figure(limit)}" for limit in self._limits]
        judged = [(dead, under[0], Severity.ERROR)]
        judged += [(sunk, f"{under[1]}, reduced by the last fall", Severity.WARNING)]
        for (bad, how, severity), episodes in zip(judged, self._episodes, strict=True):
            if (new := episodes.update(bad)) is not None:
                worst = int(np.argmin(np.where(new, values, np.inf)))
                fell = f", after {figure(held[worst, 0])} {look.step - self._looks.steps[0]} steps before"
                if held[worst, 0] <= values[worst]:  # it fell earlier
                    largest, then = self._largest[worst], self._step_of_largest[worst]
                    fell = f", after {figure(largest)} at step {then}"
                said = f"is {figure(values[worst])}{fell}"
                yield self.columns.raised(LATE_COLLAPSE, look, new, worst, severity, said, how)


class Stuck:
    """Judge of a loss beside the targets' entropy."""

    def __init__(self, layout: Layout, notes: Mapping[str, Any]) -> None:
        self.columns = Columns(layout, {"loss"})
        self._notes = notes  # the entropy may be found later
        self._losses = np.zeros((len(self.columns), LONG))
        self._entered = 0
        self._episodes = Episode()

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        usable = look.usable[self.columns.numbers]
        if not usable.all():
            return
        values = look.values[self.columns.numbers]
        self._losses[:, self._entered % LONG] = values
        self._entered += 1
        entropy = self._notes.get("entropy")
        if not isinstance(entropy, int | float) or not math.isfinite(entropy):
            return
        if self._entered < LONG or self._entered % APART:
            return
        held = np.roll(self._losses, -(self._entered % LONG), axis=1)
        halves = np.split(held, 2, axis=1)
        before, now = (middle(half) for half in halves)
        near = (np.abs(before - entropy) < LEARNT) & (np.abs(now - entropy) < LEARNT)
        error = math.sqrt(math.pi / LONG) * SIGMA * middle(np.abs(halves[1] - now[:, None]))
        near &= now > entropy - BELOW * error
        if (new := self._episodes.update(near & (before - now < FALL))) is not None:
            worst = int(np.flatnonzero(new)[0])
            said = (
                f"has a median of {figure(now[worst])} in {LONG // 2} steps, after {figure(before[worst])}; "
                f"the unigram entropy is {figure(entropy)}"
            )
            how = f"medians of {LONG // 2} steps: {figure(before[worst])}, {figure(now[worst])}"
            yield self.columns.raised(STUCK, look, new, worst, Severity.WARNING, said, how)
