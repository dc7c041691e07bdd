"""NS807: slow growth of a stream, a branch, a logit or a weight norm."""

import math
from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Floats, Look, Mask
from normscope.monitor.alarms.episodes import Episodes
from normscope.monitor.alarms.looks import APART, Looks, logarithm
from normscope.monitor.alarms.window import SIGMA, middle
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm, figure

SPANS = (10, 20)
"""Values over which a trend is judged, `APART` steps apart or more: 100 and 200 steps."""
DOUBLING = math.log(2)
"""Growth over a span that counts."""
AGE = 2.5
"""Steps before the span over the steps within it. t² doubles within a span only where this is under 1/(√2 −
1) = 2.4. For weights also the sums of the learning rates, since a warm restart moves them anew."""
CERTAIN = 6.0
"""Growth over its standard error."""
STEADY = 0.5
"""Largest share of the growth that one value may add: a jump to another level is no growth."""
LOGIT = 100.0
"""Largest logit from which its growth counts: QK-Clip acts from there on."""

SLOW_GROWTH = alarm(
    "NS807",
    "slow-growth",
    summary="A stream, a branch, a logit or a weight norm keeps doubling.",
    why="""Growth by a constant factor ends in an overflow, in saturated attention or in a stream that no
        branch can change. It shows hundreds of steps before the loss moves. Healthy growth slows down: a
        weight norm under Adam grows with the sum of the learning rates at most, and a power of t doubles ever
        more slowly.""",
    threshold=f"""The logarithm rises by log 2 over the last {SPANS[0]} or {SPANS[1]} values ({APART} steps
        apart or more), by the line through the medians of its first and last third, and by {CERTAIN:g}
        standard errors from second differences; no value adds more than {STEADY:g} of it. The steps before
        the span are {AGE:g} times those within it, or more, and for weights the learning rates sum to as
        much. A weight norm must reach the median of all weight norms, because a bias of 1e-4 doubles by
        rounding alone. A branch must be as large as the stream that it is added to: a smaller one that grows
        begins to learn. A largest logit must have reached {LOGIT:g}. A warning; a note for weight norms and
        largest values of a stream.""",
    source="""Closed form for powers; Kimi K2, arXiv:2507.20534 (QK-Clip acts from 100 on); Wortsman et al.
        2023, arXiv:2309.14322 (logits that grow before a run diverges); the resistant line is Tukey's.""",
    remedy="""Attention logits: QK-norm, a lower learning rate for queries and keys, or QK-Clip. Stream: a
        norm on the branches' outputs, weight decay, a smaller scale of the output projections. Output logits:
        z-loss.""",
)
_LOGITS = frozenset({"attention/max-logit", "logits/max"})
_NOTED = frozenset({"weight/norm", "stream/max"})
QUANTITIES = _LOGITS | _NOTED | {"stream/rms", "branch/update-ratio"}


class Growth:
    """Judge of slow growth in one layout."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout, QUANTITIES)
        names = [quantity for quantity, _ in self.columns.names]
        self._logits = np.array([name in _LOGITS for name in names], dtype=bool)
        self._noted = np.array([name in _NOTED for name in names], dtype=bool)
        self._weights = np.array([name == "weight/norm" for name in names], dtype=bool)
        self._branches = np.array([name == "branch/update-ratio" for name in names], dtype=bool)
        self._looks = Looks(len(names), max(SPANS))
        self._episodes = [Episodes(len(names)) for _ in (True, False)]

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        values, usable = logarithm(look, self.columns.numbers)
        if not self._looks.enter(look, values, usable):
            return
        rise, steps = np.zeros(len(values)), np.zeros(len(values))
        for span in SPANS:
            self._judge(span, rise, steps)
        grows = (rise > 0) & self._is_large(values, usable)
        for noted, episodes in zip((True, False), self._episodes, strict=True):
            if (new := episodes.update(grows & (self._noted == noted), usable)) is None:
                continue
            worst = int(np.argmax(np.where(new, rise, -np.inf)))
            factor, value = math.exp(rise[worst]), math.exp(values[worst])
            said = f"has grown {figure(factor)} times in {figure(steps[worst])} steps, to {figure(value)}"
            severity = Severity.NOTE if noted else Severity.WARNING
            how = f"{figure(factor)} times in {figure(steps[worst])} steps"
            yield self.columns.raised(SLOW_GROWTH, look, new, worst, severity, said, how)

    def _is_large(self, values: Floats, usable: Mask) -> Mask:
        """Mask without weight norms under the median of all, and without branches smaller than the stream."""
        large = ~self._weights & (~self._branches | (values >= 0))
        if (known := self._weights & usable).any():
            large[known] = values[known] >= middle(values[known])
        return large

    def _judge(self, span: int, rise: Floats, steps: Floats) -> None:
        """Enter the growth over the last `span` values, and its steps, where it counts."""
        looks = self._looks
        first, last = int(looks.steps[-span]), int(looks.steps[-1])
        young = looks.paths[-span] - looks.first_path < AGE * (looks.paths[-1] - looks.paths[-span])
        if first - (looks.first_step or 0) < AGE * (last - first):
            return
        there: Mask = (looks.run >= span) & (looks.values[:, -1] - looks.values[:, -span] > DOUBLING / 2)
        chosen = np.flatnonzero(there & ~(self._weights & young))
        if not len(chosen):
            return
        values = looks.values[chosen, -span:]
        third = span // 3
        early, late = middle(values[:, :third]), middle(values[:, -third:])
        slope = (late - early) / (span - third)
        bends = np.abs(np.diff(values, n=2, axis=1))  # of noise: √6 of its standard deviation
        error = math.sqrt(math.pi / 2) * SIGMA * middle(bends) / math.sqrt(6) * math.sqrt(2 / third)
        jump = np.diff(values, axis=1).max(axis=1)
        grown = slope * (span - 1)
        counts = (grown >= DOUBLING) & (late - early >= np.maximum(CERTAIN * error, jump / STEADY))
        counts &= ~self._logits[chosen] | (values[:, -1] > math.log(LOGIT))
        more = counts & (grown > rise[chosen])
        rise[chosen[more]] = grown[more]
        steps[chosen[more]] = last - first
