"""The loss to beat of single batches.

Batches differ in it: the mean of 20 batches of 4 × 64 tokens differs by 0.02 to 0.08 nats from that of the
text, where 0.1 means "trains", and on a series with bursts by 24 % (`benchmarks/regimes/own_batches.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from normscope.subjects.subject import Batch
from normscope.subjects.targets import targets_of


@dataclass(eq=False)
class LossesWithoutInput:
    """The best loss without the input of each batch of a subject, by the batch's number from 0.

    Attributes:
        of: gives it for a batch; None where it is unknown.
    """

    of: Callable[[Batch], float | None]
    _known: dict[int, float | None] = field(default_factory=dict)

    def seen(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of a trial from the start, which are entered."""
        for number, batch in enumerate(batches):
            self.enter(number, batch)
            yield batch

    def enter(self, number: int, batch: Batch) -> None:
        """Enter a batch; once is enough for all trials."""
        if number not in self._known:
            self._known[number] = self.of(batch)

    def mean(self, steps: Sequence[range]) -> float | None:
        """Mean over steps of the mean over each one's batches, given by number; None if one is unknown."""
        means = [_mean([self._known.get(number) for number in step]) for step in steps]
        return _mean(means)


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [each for each in losses if each is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


@dataclass(frozen=True, eq=False)
class CrossEntropyOfCounts:
    """Mean cross-entropy in nats of a batch's targets under their frequencies in all data.

    Attributes:
        counts: occurrences of each target in all data, (V,).
    """

    counts: np.ndarray

    def __call__(self, batch: Batch) -> float | None:
        """The cross-entropy; None if a target does not occur in the data, or there are none."""
        targets = targets_of(batch)
        if targets is None or not targets.numel() or int(targets.max()) >= len(self.counts):
            return None
        found = self.counts[targets.cpu().numpy()]
        return float(np.log(self.counts.sum() / found).mean()) if found.all() else None


def of_counts(counts: np.ndarray) -> LossesWithoutInput:
    """The cross-entropies of batches, from the occurrences (V,) of each target in all data."""
    return LossesWithoutInput(CrossEntropyOfCounts(counts))
