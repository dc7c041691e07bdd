"""NS801, NS802 and NS803: values that are not finite, finite garbage, and steps that are skipped."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Look, Mask
from normscope.monitor.alarms.episodes import Episode, Episodes
from normscope.monitor.row import GARBAGE, Layout
from normscope.rules import Finding, Severity, alarm, figure

SKIPS, WITHIN = 17, 100
"""Steps skipped among the last ones: sixteen halvings take a loss scale of 2^16 to 1."""

NOT_FINITE = alarm(
    "NS801",
    "not-finite",
    summary="A value of the run became NaN or infinite.",
    why="""A NaN reaches every parameter within one step, and Adam's moments never lose it. It also passes
        through comparisons and maxima unseen: NaN > limit is false. So it is looked for before any other
        alarm judges the row, and it enters no median.""",
    threshold="""Any measured value that is NaN or infinite. A gradient that a GradScaler found and whose
        step it skipped is left to NS803.""",
    source="Exact, no threshold.",
    remedy="""Read the first wrong value of the run: it names the module, the operation and the step. Then an
        overflow in half precision (NS812), a division by zero, a fully masked row of attention, or the
        batch.""",
)
GARBAGE_VALUE = alarm(
    "NS802",
    "garbage-value",
    summary="A value of the run is finite and beyond all reason.",
    why="""A value of 1e30 is not NaN, so no check for finiteness sees it. Its square is infinite in float32,
        and the next norm, variance or gradient norm turns it into one.""",
    threshold=f"""Any measured value above {GARBAGE:g} in size.""",
    source="""IEEE 754 binary32: squares overflow from 1.8e19 on, exact. The margin of a factor of 18 is our
        own choice.""",
    remedy="""Treat it as a NaN: look at the first wrong value, at uninitialised memory (torch.empty), and at
        a parameter or an optimizer state that exploded.""",
)
STEPS_SKIPPED = alarm(
    "NS803",
    "steps-skipped",
    summary="Many of the last steps were skipped, so the weights hardly change.",
    why="""A GradScaler skips a step whose gradient is not finite and halves its loss scale. A few skips at
        the start are how it finds the scale. When halving does not help, the gradient is not finite whatever
        the scale: the run goes on and learns nothing.""",
    threshold=f"""{SKIPS} of the last {WITHIN} steps skipped.""",
    source="""PyTorch's documentation of torch.amp.GradScaler (initial scale 2^16, factor 0.5): sixteen skips
        reach the scale 1, exact.""",
    remedy="""Look for the first wrong value: a NaN in the forward, or a weight that is not finite already.
        Train in bfloat16, which needs no loss scale.""",
)


class _Exact:
    """Episodes of wrong values, each of which is a fault, with the last wrong value of each column."""

    def __init__(self, count: int) -> None:
        self._episodes = Episodes(count, exact=True)
        self._values = np.zeros(count)
        self._steps = np.zeros(count, dtype=np.int64)

    def update(self, wrong: Mask, look: Look) -> Mask | None:
        """Enter one row; the columns to report, None where there are none."""
        if wrong.any():
            self._values[wrong], self._steps[wrong] = look.values[wrong], look.step
        return self._episodes.update(wrong, look.measured)

    def first(self, new: Mask, look: Look) -> tuple[int, Look, str]:
        """The first column to report, the row with the wrong values, and "is {}" or "was {} at step 3"."""
        worst = int(np.flatnonzero(new)[0])
        step = int(self._steps[worst])
        seen = dataclasses.replace(look, values=np.where(new, self._values, look.values))
        return worst, seen, "is {}" if step == look.step else f"was {{}} at step {step}"


class Wrong:
    """Judge of one layout: values that are not finite, and garbage."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout)
        names = [quantity for quantity, _ in layout]
        self._gradients = np.array([name.startswith(("gradient/", "update/")) for name in names], dtype=bool)
        self._skipped = [i for i, name in enumerate(names) if name == "skipped"]
        self._wrong, self._garbage = _Exact(len(names)), _Exact(len(names))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        finite = np.isfinite(look.values)
        wrong: Mask = look.measured & ~finite
        if wrong.any() and self._was_skipped(look):
            wrong &= ~self._gradients
        if (new := self._wrong.update(wrong, look)) is not None:
            worst, seen, said = self._wrong.first(new, look)
            said = said.format("NaN" if np.isnan(seen.values[worst]) else "infinite")
            yield self.columns.raised(NOT_FINITE, seen, new, worst, Severity.ERROR, said, "the value itself")
        garbage = np.zeros_like(finite)
        garbage[finite] = np.abs(look.values[finite]) > GARBAGE
        if (new := self._garbage.update(garbage, look)) is not None:
            worst, seen, said = self._garbage.first(new, look)
            said = f"{said.format(figure(float(seen.values[worst])))}: finite, and garbage"
            yield self.columns.raised(
                GARBAGE_VALUE, seen, new, worst, Severity.ERROR, said, "the value itself"
            )

    def _was_skipped(self, look: Look) -> bool:
        return any(look.usable[i] and look.values[i] == 1 for i in self._skipped)


class Skipped:
    """Judge of the steps that were skipped."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout, {"skipped"})
        self._last = np.zeros((len(self.columns), WITHIN), dtype=bool)
        self._rows = 0
        self._episodes = Episode()

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        numbers = self.columns.numbers
        usable = look.usable[numbers]
        self._last[:, self._rows % WITHIN] = usable & (np.where(usable, look.values[numbers], 0.0) == 1)
        self._rows += 1
        skips = self._last.sum(axis=1)
        if (new := self._episodes.update(skips >= SKIPS)) is not None:
            worst = int(np.flatnonzero(new)[0])
            said = f"says that {skips[worst]} of the last {min(self._rows, WITHIN)} steps changed no weight"
            yield self.columns.raised(
                STEPS_SKIPPED, look, new, worst, Severity.ERROR, said, "1 for a step that was skipped"
            )
