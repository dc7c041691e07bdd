"""NS804, NS805 and NS806: spikes of the loss, of a gradient and of an update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from normscope.monitor.alarms.columns import Columns, Look
from normscope.monitor.alarms.episodes import Episode
from normscope.monitor.alarms.window import LEAST, SIZE, Window
from normscope.monitor.row import Layout
from normscope.rules import Finding, Record, Severity, alarm, figure

SIGMAS = 7.0
"""Robust standard deviations above the median: the spike score of OLMo 2 counts from seven on."""
LOSS_RISE = 0.1
"""Smallest rise of a loss over its median: on large batches seven deviations may be 1 % of it."""
LOSS_ALONE = 1.5
"""Ratio from which one loss suffices. Batches of 256 tokens of Tiny Shakespeare go to 1.2 once in ten runs of
2,000 steps that go on well."""
GRADIENT_SIGMAS = 10.0
"""The same for gradients, which have heavy tails: a Student-t with 5 degrees of freedom passes 7 once in
3,000 values and 10 once in 17,000."""
GRADIENT_RATIO = 4.0
"""Smallest ratio of a gradient to its median that counts."""
GRADIENT_LEAST = 100
"""Values from which a gradient is judged: before, a warm-up goes on, attention awakes and branches open
(ReZero's gradients grow 280-fold within 40 steps, and it trains well). A jump that does harm there is found
in the loss and the updates."""
RECENT = 10
"""Values whose median is the level of a gradient, which falls while a run memorises and grows while its
attention awakes."""
ALONE = 10.0
"""Ratio from which one value suffices: Megatron-LM calls ten times the largest gradient so far unexpected."""
TWICE_IN = 5
"""Values within which a smaller one must return: one odd batch is gone in the next step, an instability is
not. So a gradient that jumps once is a note, however far: NormFormer trains well past one of 356 times its
median."""
UPDATE_RATIO = 2.0
"""Smallest ratio of an update to its median at the same learning rate; Adam with β = (0.9, 0.999) gives 3.2
after one gradient that is much larger than all before it."""
_WINDOW = f"""the median of the last {SIZE} values without spikes, from {LEAST} on"""
_RECENT = f"""the median of the last {RECENT} values without spikes, from {GRADIENT_LEAST} on"""

LOSS_SPIKE = alarm(
    "NS804",
    "loss-spike",
    summary="The loss jumped.",
    why="""A jump of the loss is a batch unlike the others, or weights that one step moved too far. A mean and
        a standard deviation take the spike into themselves and miss the next one; a median and a MAD do not,
        and spikes stay out of the window.""",
    threshold=f"""Loss above {_WINDOW}, by {SIGMAS:g}·1.4826·MAD and by {LOSS_RISE:g} of the median, twice in
        {TWICE_IN} values; or once by a factor of {LOSS_ALONE:g}, which a loss that has been negative
        does not need. One alarm until 20 values in a row are normal.""",
    source="""OLMo 2, arXiv:2501.00656 (spike score: seven standard deviations from a rolling average); the
        smallest rise is our own choice.""",
    remedy="""Look at the batch of the step and at NS805 before it. If spikes return, lower the learning rate,
        lengthen the warm-up, clip gradients, lower Adam's β2 to 0.95, or skip the batch (PaLM,
        arXiv:2204.02311).""",
)
GRADIENT_SPIKE = alarm(
    "NS805",
    "gradient-spike",
    summary="A gradient norm jumped.",
    why="""A gradient norm is judged on a logarithmic scale, since its noise multiplies. Adam divides by a
        mean of past squares that does not know the new size yet, so the step is too long; the loss follows a
        few steps later.""",
    threshold=f"""Norm above {_RECENT}, by a factor of {GRADIENT_RATIO:g} and by
        {GRADIENT_SIGMAS:g}·1.4826·MAD of the logarithms of the last {SIZE} such ratios, twice in {TWICE_IN}
        values; or once by a factor of {ALONE:g}, which is a note. Norms of exactly 0 are left out.""",
    source="""OLMo 2, arXiv:2501.00656 (gradient spikes often precede those of the loss); Zhang et al. 2020,
        arXiv:1912.03194 (heavy tails); our own quantiles of a Student-t.""",
    remedy="""Clip the gradient norm; look at the sites that jumped first, and at the batch. In half precision
        see NS812.""",
)
UPDATE_SPIKE = alarm(
    "NS806",
    "update-spike",
    summary="An update was much larger than its learning rate explains.",
    why="""Update over learning rate is what the optimizer adds of its own. Under Adam it is near 1 in each
        entry and jumps when the gradient grows faster than √v, whose mean reaches back 1/(1−β2) steps.""",
    threshold=f"""Update over learning rate above {_WINDOW}, by {SIGMAS:g}·1.4826·MAD of its logarithm and by
        a factor of {UPDATE_RATIO:g}, twice in {TWICE_IN} values; or once by a factor of {ALONE:g}.""",
    source="""Molybog et al. 2023, arXiv:2304.09871 (updates of Adam at loss spikes); closed form
        (1−β1)/√(1−β2) = 3.2 for the smallest ratio.""",
    remedy="""Lower β2 to 0.95, clip gradients, or bound the update (as in StableAdamW, arXiv:2304.13013).""",
)


@dataclass(frozen=True)
class Kind:
    """One kind of spike.

    Attributes:
        quantities: names of the columns.
        least: smallest ratio to the median that counts.
        alone: ratio from which one spike is an alarm; two in `TWICE_IN` values below it.
        is_grave_alone: whether one spike is a warning, else a note.
        per_rate: values are divided by the learning rate.
        recent, first: `recent` and `least` of its `Window`.
    """

    record: Record
    quantities: frozenset[str]
    sigmas: float
    least: float
    alone: float
    is_grave_alone: bool = True
    per_rate: bool = False
    recent: int = 0
    first: int = LEAST


_GRADIENTS = frozenset({"gradient/norm", "gradient/block", "gradient/kind"})
KINDS = (
    Kind(LOSS_SPIKE, frozenset({"loss"}), SIGMAS, 1 + LOSS_RISE, LOSS_ALONE),
    Kind(
        GRADIENT_SPIKE,
        _GRADIENTS,
        GRADIENT_SIGMAS,
        GRADIENT_RATIO,
        ALONE,
        False,
        recent=RECENT,
        first=GRADIENT_LEAST,
    ),
    Kind(
        UPDATE_SPIKE, frozenset({"update/ratio", "update/norm"}), SIGMAS, UPDATE_RATIO, ALONE, per_rate=True
    ),
)


class Spikes:
    """Judge of one kind of spike in one layout.

    Series are judged on a logarithmic scale. A loss that has been negative is judged as it is after that.
    """

    def __init__(self, kind: Kind, layout: Layout) -> None:
        self._kind = kind
        self.columns = Columns(layout, kind.quantities)
        self._logarithm = True
        self._window = Window(
            len(self.columns),
            sigmas=kind.sigmas,
            effect=math.log(kind.least),
            recent=kind.recent,
            least=kind.first,
        )
        self._since = np.full(len(self.columns), TWICE_IN)
        self._episodes = {Severity.WARNING: Episode(), Severity.NOTE: Episode()}

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        kind, numbers = self._kind, self.columns.numbers
        usable = look.usable[numbers]
        values = np.where(usable, look.values[numbers], 0.0)
        if kind.record is LOSS_SPIKE and self._logarithm and (values < 0).any():
            self._logarithm = False
            self._window = Window(len(values), sigmas=kind.sigmas, relative=kind.least - 1)
        if kind.per_rate and look.lr is not None:
            if look.lr <= 0:
                return
            values = values / look.lr
        if self._logarithm:
            usable = values > 0
            values = np.log(values, where=usable, out=np.zeros_like(values))
        spikes, median = self._window.judge(values, usable)
        self._since = self._since + usable
        again = self._since < TWICE_IN
        self._since[spikes] = 0
        rise = values - median
        alone = math.log(kind.alone) if self._logarithm else 0.0  # the size of a negative loss means nothing
        spikes = spikes & (again | (rise >= alone))
        is_grave = kind.is_grave_alone or bool((spikes & again).any())
        severity = Severity.WARNING if is_grave else Severity.NOTE
        for each, episode in self._episodes.items():
            if (new := episode.update(spikes if each is severity else np.zeros_like(spikes))) is not None:
                worst = int(np.argmax(np.where(new, rise, -np.inf)))
                words = self._words(look, worst, float(median[worst]))
                yield self.columns.raised(kind.record, look, new, worst, severity, *words)

    def _words(self, look: Look, worst: int, median: float) -> tuple[str, str]:
        """The sentence about the worst series, and how its value was measured."""
        value = float(look.values[self.columns.numbers[worst]])
        rate = look.lr if self._kind.per_rate else None
        if self._logarithm:
            median = math.exp(median) * (rate or 1.0)
        if self._kind.record is LOSS_SPIKE:
            said = f"jumps to {figure(value)} from a median of {figure(median)}"
        else:
            said = f"is {figure(value)}, {figure(value / median)} times its median"
            said += " at this learning rate" if rate else ""
        return said, f"the median before is {figure(median)}"
