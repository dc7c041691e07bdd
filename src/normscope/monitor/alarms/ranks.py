"""NS814: one rank unlike the others."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from normscope.monitor.alarms.columns import Columns, Floats, Look, Mask
from normscope.monitor.alarms.episodes import Episode
from normscope.monitor.alarms.window import SIGMA
from normscope.monitor.row import Layout
from normscope.rules import Finding, Hit, Severity, alarm, figure

APART = 1e-3
"""Relative difference of a figure that all ranks must share; rounding in another order gives 1e-6."""
RATIO = {"loss": 1.5, "stream/rms": 2.0, "stream/max": 2.0, "branch/update-ratio": 2.0}
"""Figures of a rank's own data, and the smallest ratio to the median of the ranks that counts."""
ROWS = 20
"""Steps over which such a ratio must last."""
CERTAIN = 6.0
"""Its logarithm over its standard error."""
FEWEST = 3
"""Ranks from which one can be unlike the others."""
OF_WEIGHTS = frozenset({"weight/norm", "gain/rms", "gradient/norm", "gradient/block"})
SHARED = frozenset({"lr", "loss-scale", "skipped"}) | OF_WEIGHTS
"""Figures that are equal on all ranks under data parallelism: gradients are averaged before the step."""

RANK_APART = alarm(
    "NS814",
    "rank-apart",
    summary="One rank is unlike the others.",
    why="""Under data parallelism all ranks hold the same weights, average the same gradients and take the
        same step. Where those figures differ the replicas have parted: another seed, a skipped step, a bad
        device. Losses and streams differ by the data only; a lasting difference is another data set or a
        broken one.""",
    threshold=f"""Shared figures (weights, averaged gradients, learning rate, loss scale, skipped steps) that
        differ by {APART:g} relative: an error; sharded weights and gradients are not judged. Loss above
        {RATIO["loss"]:g} times the ranks' median or its inverse, streams above {RATIO["stream/rms"]:g} times,
        as the median of {ROWS} steps and by {CERTAIN:g} standard errors, among {FEWEST} ranks or more: a
        warning. The Monitor of rank 0 raises it, from the rows that all ranks store in one file.""",
    source="""Exact for shared figures (PyTorch's documentation of DistributedDataParallel); the ratios are
        our own choice.""",
    remedy="""Weights: broadcast them from rank 0, and let all ranks decide together whether to skip a step.
        Data: compare the batches of the ranks; run a memory and a link test on the device.""",
)


class Ranks:
    """Judge of the rows of all ranks in one layout.

    Rows of a step are judged when every rank has given one; ranks are those seen so far, or notes["ranks"].
    Layouts may have one episode `parted` of shared figures, because a skipped step parts the weights too. It
    lasts until the weights have been equal for a while.
    """

    def __init__(self, layout: Layout, notes: Mapping[str, Any], parted: Episode | None = None) -> None:
        self._shared = Columns(layout, SHARED - OF_WEIGHTS if notes.get("sharded") else SHARED)
        self._own = Columns(layout, RATIO)
        self._effect = np.log([RATIO[name] for name, _ in self._own.names])
        self._ranks = int(notes.get("ranks", 2))
        self._rows: dict[int, Look] = {}
        self._values: list[Floats] = []
        self._episodes = parted or Episode(), Episode()
        self._ends_episodes = parted is None or any(name == "weight/norm" for name, _ in self._shared.names)

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of the step whose last row this is."""
        self._rows[look.rank] = look
        self._ranks = max(self._ranks, len(self._rows))
        looks = [self._rows[rank] for rank in sorted(self._rows)]
        if len(looks) == self._ranks and all(each.step == look.step for each in looks):
            yield from self.judge(looks)

    def judge(self, looks: list[Look]) -> Iterator[Finding]:
        """Alarms of one step, of which these are the rows, two or more, in the order of the ranks."""
        yield from self._judge_shared(looks)
        if len(looks) >= FEWEST:
            yield from self._judge_own(looks)

    def _judge_shared(self, looks: list[Look]) -> Iterator[Finding]:
        values, usable = _stacked(looks, self._shared)
        high, low = values.max(axis=0), values.min(axis=0)
        size = np.maximum(high, -low)
        bad = usable & (high - low > APART * size)
        if not (self._ends_episodes or bad.any()):
            return
        if (new := self._episodes[0].update(bad)) is not None:
            apart = np.abs(values - np.median(values, axis=0))
            share = np.where(new, apart.max(axis=0) / np.maximum(size, 1e-300), -np.inf)
            worst = int(np.argmax(share))
            said = f"{self._shared.title(worst)} must be equal on all ranks and is"
            yield self._raised(looks, self._shared, new, worst, int(np.argmax(apart[:, worst])), said)

    def _judge_own(self, looks: list[Look]) -> Iterator[Finding]:
        values, usable = _stacked(looks, self._own)
        usable = usable & (values > 0).all(axis=0)
        values = np.where(usable, values, 1.0)
        if self._values and self._values[-1].shape != values.shape:  # another number of ranks
            self._values.clear()
        self._values.append(values)
        if len(self._values) < ROWS:
            return
        logs, self._values = np.log(np.stack(self._values)), self._values[ROWS // 2 :]
        held = logs - np.median(logs, axis=1, keepdims=True)
        median = np.median(held, axis=0)
        spread = SIGMA * np.median(np.abs(held - median), axis=(0, 1))
        limit = np.maximum(self._effect, CERTAIN * math.sqrt(math.pi / 2 / ROWS) * spread)
        apart = np.abs(median)
        bad = usable & (apart.max(axis=0) > limit)
        if (new := self._episodes[1].update(bad)) is not None:
            worst = int(np.argmax(np.where(new, apart.max(axis=0) / limit, -np.inf)))
            said = f"{self._own.title(worst)} has been unlike the other ranks' for {ROWS} steps and is"
            yield self._raised(looks, self._own, new, worst, int(np.argmax(apart[:, worst])), said)

    def _raised(
        self, looks: list[Look], columns: Columns, new: Mask, worst: int, odd: int, said: str
    ) -> Finding:
        values, _ = _stacked(looks, columns)
        others = float(np.median(np.delete(values[:, worst], odd)))
        rest = "the others" if len(looks) > 2 else f"rank {looks[1 - odd].rank}"
        message = (
            f"At step {looks[0].step}, {said} {figure(values[odd, worst], 5)} on rank {looks[odd].rank}, "
            f"{figure(others, 5)} on {rest}."
        )
        severity = Severity.ERROR if columns is self._shared else Severity.WARNING
        evidence = [
            row
            for each in looks
            for row in columns.evidence(each, [worst], f"rank {each.rank}")
            if each.rank == looks[odd].rank or len(looks) <= FEWEST
        ]
        return RANK_APART.finding(Hit(severity, columns.sites(new), message, tuple(evidence)))


def _stacked(looks: list[Look], columns: Columns) -> tuple[Floats, Mask]:
    """Values of each rank, [ranks, columns], 0 where a rank has none; and the columns that all have."""
    usable = np.all([each.usable[columns.numbers] for each in looks], axis=0)
    values = np.stack([each.values[columns.numbers] for each in looks])
    return np.where(usable, values, 0.0), np.asarray(usable)
