"""NS815: a loss that rises slowly."""

import math
from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Look
from normscope.monitor.alarms.episodes import Episode
from normscope.monitor.alarms.looks import APART
from normscope.monitor.alarms.window import SIGMA, middle
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm, figure

RECENT = 50
"""Losses whose median is the level of a loss."""
GIVEN_BACK = 0.25
"""Share of its fall that a loss gives back."""
RISE = 0.1
"""Smallest rise over the lowest level."""
CERTAIN = 6.0
"""The rise over the standard error of a median."""

LOSS_RISES = alarm(
    "NS815",
    "loss-rises",
    summary="The loss rises slowly and has given back a part of its fall.",
    why="""A run that diverges slowly never jumps: every loss is close to the one before, and a window that
        follows the loss follows it upwards. So the loss is compared with the lowest level that it ever
        had.""",
    threshold=f"""Median of {RECENT} losses above the lowest such median by {GIVEN_BACK:g} of the fall from
        the first one to the lowest, and by {RISE:g} of the lowest,
        and by {CERTAIN:g} standard errors.""",
    source="""Our own choice: shares of the run's own fall do not depend on the kind of loss, and a new data
        mixture or a warm restart gives back less.""",
    remedy="""Go back to the checkpoint at the lowest loss with a lower learning rate. Look at streams, logits
        and weights that grow (NS807), and at the data since then.""",
)


class Rise:
    """Judge of a loss that rises slowly."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout, {"loss"})
        self._losses = np.zeros((len(self.columns), RECENT))
        self._entered = 0
        self._first = np.full(len(self.columns), np.nan)
        self._lowest = np.full(len(self.columns), np.inf)
        self._episode = Episode()

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        usable = look.usable[self.columns.numbers]
        if not usable.all():
            return
        self._losses[:, self._entered % RECENT] = look.values[self.columns.numbers]
        self._entered += 1
        if self._entered < RECENT or self._entered % APART:
            return
        now = middle(self._losses)
        if self._entered == RECENT:
            self._first = now
        self._lowest = np.minimum(self._lowest, now)
        rise = now - self._lowest
        error = math.sqrt(math.pi / 2 / RECENT) * SIGMA * middle(np.abs(self._losses - now[:, None]))
        least = np.maximum(GIVEN_BACK * (self._first - self._lowest), RISE * np.abs(self._lowest))
        least = np.maximum(least, CERTAIN * error)
        if (new := self._episode.update(rise > least)) is not None:
            worst = int(np.argmax(np.where(new, rise, -np.inf)))
            lowest = figure(self._lowest[worst])
            said = f"has a median of {figure(now[worst])} in {RECENT} steps; its lowest was {lowest}"
            how = f"median of {RECENT} steps {figure(now[worst])}, lowest {lowest}"
            yield self.columns.raised(LOSS_RISES, look, new, worst, Severity.WARNING, said, how)
