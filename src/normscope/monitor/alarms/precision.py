"""NS812 and NS813: half precision that runs out of range, and gains whose updates are rounded away."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from normscope.monitor.alarms.columns import Columns, Floats, Look, Mask
from normscope.monitor.alarms.episodes import Episodes
from normscope.monitor.alarms.looks import APART, Looks
from normscope.monitor.alarms.window import middle
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm, figure
from normscope.rules.precision import HEADROOM_BITS
from normscope.rules.wiring_learning import LOST

LAST_BIT = 1.0
"""Bits of headroom under which a value is one doubling from infinity."""
AHEAD = 200
"""Steps within which a headroom that shrinks must reach 0."""
LOOKS = 10
"""Values over which it shrinks."""
CONFIRMED = 5
"""Values in a row at which updates are lost."""
LARGEST = {"float16": 65504.0}
"""Largest number of the precisions that run out of range before float32 does."""
HALF = ("bfloat16", "float16")
"""Precisions of weights in which rounding loses updates of a usual size."""

HEADROOM = alarm(
    "NS812",
    "headroom",
    summary="Activations are about to overflow half precision.",
    why="""Headroom is log2(limit / largest value), the number of doublings before infinity. The largest
        activations grow slowly and steadily, so the step at which they overflow can be predicted.""",
    threshold=f"""Under {LAST_BIT:g} bit; or under {HEADROOM_BITS:g} bits and, by the medians of both halves
        of the last {LOOKS} values ({APART} steps apart or more), 0 within {AHEAD} steps. Float16 only.""",
    source="""IEEE 754 binary16 (65504); the margin of NS501; the straight line ahead is our own choice.""",
    remedy="""Train in bfloat16, keep the residual stream and the norms in float32, or bring the scale of the
        output projections down (NS501).""",
)
GAINS_FREEZE = alarm(
    "NS813",
    "gains-freeze",
    summary="Rounding loses most updates of half-precision weights.",
    why="""The bfloat16 numbers next to 1 are 0.0039 and 0.0078 away. A step smaller than half of that rounds
        back, so a norm gain near 1 stops at once under Adam at 3e-4, and matrices follow as the learning rate
        decays.""",
    threshold=f"""At least {LOST:g} of the entries are left as they were, {CONFIRMED} values in a row, {APART}
        steps apart or more. Weights in bfloat16 or float16 only.""",
    source="""IEEE 754 rounding, exact; Zamirai et al. 2020, arXiv:2010.06192; the limit of NS707.""",
    remedy="""Keep the weights in float32 under torch.autocast, keep a float32 copy in the optimizer, or round
        stochastically (NS707).""",
)


class Headroom:
    """Judge of the headroom in half precision.

    The bits are the columns "precision/float16-headroom"; in a layout without any they are those of
    "stream/max", where notes["dtype"] is "float16".
    """

    def __init__(self, layout: Layout, notes: Mapping[str, Any]) -> None:
        self._limit = LARGEST.get(str(notes.get("dtype", "")).removeprefix("torch."))
        self.columns = Columns(layout, {"precision/float16-headroom"})
        if not len(self.columns) and self._limit:
            self.columns = Columns(layout, {"stream/max"})
        self._is_size = np.array([name == "stream/max" for name, _ in self.columns.names], dtype=bool)
        self._looks = Looks(len(self.columns), LOOKS)
        self._episodes = Episodes(len(self.columns))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        bits, usable = self._bits(look)
        if not self._looks.enter(look, bits, usable):
            return
        early, late = (middle(half) for half in np.split(self._looks.values, 2, axis=1))
        apart = max(1, int(self._looks.steps[-1] - self._looks.steps[0])) / (LOOKS - 1)
        steps = apart * LOOKS / 2  # between the halves' centres
        since = apart * (LOOKS / 2 - 1) / 2  # from the late half's centre to the last value
        ahead = late - (early - late) * (since + AHEAD) / steps
        shrinks = (self._looks.run >= LOOKS) & (late < early) & (ahead <= 0)
        low = usable & ((bits < LAST_BIT) | ((bits < HEADROOM_BITS) & shrinks))
        if (new := self._episodes.update(low, usable)) is None:
            return
        worst = int(np.argmin(np.where(new, bits, np.inf)))
        said = f"leaves {figure(max(0.0, bits[worst]))} bits before float16 overflows"
        if shrinks[worst] and (left := steps * late[worst] / (early[worst] - late[worst]) - since) > 0:
            said += f"; at this pace it does so in {figure(left)} steps"
        how = f"{figure(bits[worst])} bits"
        yield self.columns.raised(HEADROOM, look, new, worst, Severity.WARNING, said, how)

    def _bits(self, look: Look) -> tuple[Floats, Mask]:
        values, usable = look.values[self.columns.numbers], look.usable[self.columns.numbers]
        if self._limit is None:
            return np.where(usable, values, 0.0), usable
        usable = usable & (~self._is_size | (np.where(usable, values, 0.0) > 0))
        values = np.where(usable, values, 1.0)
        sizes = np.log(np.where(self._is_size, values, 1.0)) / math.log(2)
        return np.where(self._is_size, math.log2(self._limit) - sizes, values), usable


class Freeze:
    """Judge of updates that rounding loses, where notes["weights"] is in `HALF` or unknown.

    In float32 what stays as it was has no gradient, which is no matter of rounding.
    """

    def __init__(self, layout: Layout, notes: Mapping[str, Any]) -> None:
        is_judged = notes.get("weights", HALF[0]) in HALF
        self.columns = Columns(layout, {"update/lost"} if is_judged else set())
        self._looks = Looks(len(self.columns), CONFIRMED)
        self._episodes = Episodes(len(self.columns))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        values, usable = look.values[self.columns.numbers], look.usable[self.columns.numbers]
        if (look.lr is not None and look.lr <= 0) or not self._looks.enter(look, values, usable):
            return
        lost = (self._looks.run >= CONFIRMED) & (self._looks.values >= LOST).all(axis=1)
        if (new := self._episodes.update(lost, usable)) is None:
            return
        worst = int(np.argmax(np.where(new, values, -np.inf)))
        said = f"is {figure(values[worst])}: that share of its entries stays as it was"
        how = f"at least {LOST:g} in the last {CONFIRMED} values"
        yield self.columns.raised(GAINS_FREEZE, look, new, worst, Severity.WARNING, said, how)
