"""NS817: Adam forgets the size of its gradients, and its steps grow until one is unstable."""

import math
from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Look
from normscope.monitor.alarms.episodes import Episodes
from normscope.monitor.alarms.looks import APART, Looks
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm, figure

QUIET = 0.1
"""Gradient over √v under which v is fed by 1 % of what it loses: it falls by the factor β2 a step."""
GROWTH = 2.0
"""Growth of Adam's factor on gradients over the root of the steps. That root is no forgetting: in the first
1/(1 − β2) steps v is the mean over all steps, and large gradients at the start weigh 1/t in it."""
CONFIRMED = 5
"""Values in a row under `QUIET`."""

ADAM_FORGETS = alarm(
    "NS817",
    "adam-forgets",
    summary="Adam forgets the size of its gradients, so that its factor on them grows without a bound.",
    why="""Adam multiplies a gradient by η/(√v + ε). Where the gradient stays far under √v, because the run
        has fitted its data or a part of it no longer learns, v only falls, by β2 a step, and the factor grows
        by 1/√β2: twice in 69 steps with β2 = 0.98, in 27 with 0.95. Training is stable up to a factor that
        depends on the curvature. Beyond it the small gradient grows as well, and the loss spikes within a
        few steps, long after it looked settled.""",
    threshold=f"""Gradient over √v under {QUIET:g} in {CONFIRMED} values in a row or more ({APART} steps apart
        or more), and the learning rate over √v + ε, over the root of the step, grown {GROWTH:g} times since
        the lowest of them.""",
    source="""Closed form, β2^(−n/2); Cohen et al. 2022, arXiv:2207.14484 (Adam trains at the edge of
        stability, with no reserve); Thilak et al. 2022, arXiv:2206.04817 (late spikes, "slingshots"); the
        limits are our own choice.""",
    remedy="""Let the learning rate decay as the loss settles, take β2 = 0.999 or a larger ε (1e-5), or stop:
        the data are fitted.""",
)


class Forgets:
    """Judge of Adam's factor on gradients in one layout."""

    def __init__(self, layout: Layout) -> None:
        lags = Columns(layout, {"adam/lag"})
        self.columns = Columns(layout, {"adam/rate"})
        known = {site: number for number, (_, site) in zip(lags.numbers, lags.names, strict=True)}
        self._lags = np.array([known.get(site, -1) for _, site in self.columns.names], dtype=np.intp)
        self._looks = Looks(len(self.columns), 1)
        self._lowest = np.full(len(self.columns), np.inf)  # over the root of the step
        self._episodes = Episodes(len(self.columns))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        rates, lags = look.values[self.columns.numbers], look.values[self._lags]
        usable = look.usable[self.columns.numbers] & look.usable[self._lags] & (self._lags >= 0)
        quiet = usable & (np.where(usable, lags, 1.0) < QUIET) & (np.where(usable, rates, 0.0) > 0)
        beside = np.where(quiet, rates, np.inf) / math.sqrt(max(1, look.step))
        if not self._looks.enter(look, beside, quiet):
            return
        self._lowest = np.where(quiet, np.minimum(self._lowest, beside), np.inf)
        lowest = np.where(self._looks.run >= CONFIRMED, self._lowest, np.inf)
        growth = np.where(quiet, beside, 0.0) / lowest
        if (new := self._episodes.update(growth >= GROWTH, usable)) is None:
            return
        worst = int(np.argmax(np.where(new, growth, 0.0)))
        times, lag = figure(growth[worst]), figure(lags[worst])
        said = f"has grown to {figure(rates[worst])}, {times} times by forgetting: gradients are {lag} of √v"
        how = f"{times} times since gradients are under {QUIET:g} of √v, over the root of the step"
        yield self.columns.raised(ADAM_FORGETS, look, new, worst, Severity.WARNING, said, how)
