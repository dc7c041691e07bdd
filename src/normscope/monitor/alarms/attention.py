"""NS819: attentions that lose their entropy."""

from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Look
from normscope.monitor.alarms.episodes import Episodes
from normscope.monitor.alarms.looks import APART, Looks
from normscope.monitor.row import Layout
from normscope.probes.attention import ENTROPY as ENTROPIES
from normscope.probes.attention import LOGIT as LOGITS
from normscope.rules import Finding, Severity, alarm, figure
from normscope.rules.signal import ENTROPY

CONFIRMED = 3
"""Values in a row."""
LARGEST = 100.0
"""Largest logit beyond which it counts, from which on QK-Clip acts."""
BEFORE = 0.25
"""Entropy that the attention must have had: one that never had it is sharp by design."""

ENTROPY_COLLAPSE = alarm(
    "NS819",
    "entropy-collapse",
    summary="All heads of an attention have become one-hot, by large logits.",
    why="""The softmax's Jacobian is diag(p) − ppᵀ: where p is one-hot, queries and keys get no gradient, and
        a small change of a query moves the attention to another key at once. Heads that look at one token are
        healthy in many models. A whole layer of them with logits beyond 100 is what precedes a divergence, or
        a loss that stays high.""",
    threshold=f"""Mean entropy of all heads under {ENTROPY:g} of that of uniform attention, with a largest
        logit above {LARGEST:g}, {CONFIRMED} values in a row, {APART} steps apart or more, in an attention
        whose entropy has been above {BEFORE:g}.""",
    source="""Zhai et al. 2023, arXiv:2303.06296 (entropy collapse in runs that diverge); the entropy is that
        of NS205; the logit that of QK-Clip, Kimi K2, arXiv:2507.20534. The earlier entropy is our own
        choice.""",
    remedy="""σReparam or QK-norm, a lower learning rate or a longer warm-up, above all for queries and keys,
        QK-Clip, or a soft cap on the logits.""",
)


class EntropyCollapse:
    """Judge of the entropies of one layout, beside the largest logits of the same attentions."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout, {ENTROPIES})
        places = {column: place for place, column in enumerate(layout)}
        self._logits = np.array([places.get((LOGITS, site), -1) for _, site in self.columns.names], dtype=int)
        self._looks = Looks(len(self.columns), CONFIRMED)
        self._had_entropy = np.zeros(len(self.columns), dtype=bool)
        self._episodes = Episodes(len(self.columns))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        entropies, logits = look.values[self.columns.numbers], look.values[self._logits]
        usable = look.usable[self.columns.numbers] & look.usable[self._logits] & (self._logits >= 0)
        known = np.where(usable, entropies, 1.0)
        one_hot = usable & (known < ENTROPY) & (np.where(usable, logits, 0.0) > LARGEST)
        if not self._looks.enter(look, one_hot.astype(float), usable):
            return
        self._had_entropy |= usable & (known > BEFORE)
        lasts = (self._looks.run >= CONFIRMED) & (self._looks.values == 1).all(axis=1)
        if (new := self._episodes.update(lasts & self._had_entropy, usable)) is None:
            return
        worst = int(np.argmin(np.where(new, known, np.inf)))
        said = (
            f"is {figure(entropies[worst])} of uniform attention's, with logits up to {figure(logits[worst])}"
        )
        how = f"largest logit {figure(logits[worst])}"
        yield self.columns.raised(ENTROPY_COLLAPSE, look, new, worst, Severity.WARNING, said, how)
