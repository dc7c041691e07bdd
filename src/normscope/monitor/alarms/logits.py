"""NS818: attention logits that have grown until attention is one-hot."""

from collections.abc import Iterator

import numpy as np

from normscope.monitor.alarms.columns import Columns, Floats, Look
from normscope.monitor.alarms.episodes import Episodes
from normscope.monitor.alarms.looks import APART, Looks
from normscope.monitor.row import Layout
from normscope.rules import Finding, Severity, alarm, figure

LARGE = 1000.0
"""Logit that counts, ten times the limit of QK-Clip."""
GROWTH = 10.0
"""Growth since the first value that counts: biases of keys give some trained models large logits."""
CONFIRMED = 3
"""Values in a row."""

LOGITS_LARGE = alarm(
    "NS818",
    "logits-large",
    summary="Attention logits have grown until attention is one-hot.",
    why="""A softmax whose logits differ by hundreds gives all weight to one key: its gradient vanishes, and a
        small change of a query moves the attention to another key at once. Queries and keys that grow
        together make the logits grow with the square, whether or not they keep doubling (NS807). The loss
        moves hundreds of steps later. In bfloat16 a logit of 1,000 is rounded to a multiple of 4.""",
    threshold=f"""Largest logit of an attention above {LARGE:g} and above {GROWTH:g} times its first value,
        {CONFIRMED} values in a row, {APART} steps apart or more.""",
    source="""Kimi K2, arXiv:2507.20534, section 2.1 (logits above 1,000 before spikes; QK-Clip from 100 on);
        Wortsman et al. 2023, arXiv:2309.14322 (attention logits at high learning rates); Zhai et al. 2023,
        arXiv:2303.06296 (entropy collapse). The growth is our own choice.""",
    remedy="QK-norm, a lower learning rate for queries and keys, weight decay on them, or QK-Clip.",
)


class Logits:
    """Judge of the largest logits in one layout."""

    def __init__(self, layout: Layout) -> None:
        self.columns = Columns(layout, {"attention/max-logit"})
        self._looks = Looks(len(self.columns), CONFIRMED)
        self._first: Floats = np.full(len(self.columns), np.nan)
        self._episodes = Episodes(len(self.columns))

    def feed(self, look: Look) -> Iterator[Finding]:
        """Alarms of a row."""
        values, usable = look.values[self.columns.numbers], look.usable[self.columns.numbers]
        if not self._looks.enter(look, values, usable):
            return
        self._first = np.where(np.isnan(self._first) & usable, values, self._first)
        limit = np.fmax(LARGE, GROWTH * self._first)
        large = (self._looks.run >= CONFIRMED) & (self._looks.values > limit[:, None]).all(axis=1)
        if (new := self._episodes.update(large, usable)) is None:
            return
        worst = int(np.argmax(np.where(new, values, -np.inf)))
        said = f"has grown to {figure(values[worst])} from {figure(self._first[worst])}"
        how = f"its first value was {figure(self._first[worst])}"
        yield self.columns.raised(LOGITS_LARGE, look, new, worst, Severity.WARNING, said, how)
