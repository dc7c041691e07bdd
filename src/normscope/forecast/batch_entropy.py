"""The entropy to beat of a single batch, from a sample of the targets.

A batch is compared with the frequencies of all *other* batches of the sample: its own would make it look
easier than batches that are not in the sample. What rare ids add to every batch is subtracted again.

Shapes: N targets, V ids of the sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normscope.subjects import Batch
from normscope.subjects.stored import Stored

UNSEEN = 0.5
"""Occurrences that are added to each id, so that one that the sample has not met has a probability."""


@dataclass(frozen=True, eq=False)
class SampledCrossEntropy:
    """Mean cross-entropy in nats of a batch's targets under their frequencies, as a loss counts it.

    Attributes:
        place: place of the targets in a batch.
        value: the same of all data, by the loss's factor and unit.
        counts: occurrences of each id in the sample (V,).
        num: batches of the sample, the first ones.
        is_all: whether there are no others.
        mean: cross-entropy of these batches, each under the frequencies of the others.
    """

    place: Stored
    value: float
    counts: np.ndarray
    num: int
    is_all: bool
    mean: float = 0.0

    @classmethod
    def of(
        cls, place: Stored, value: float, batches: Sequence[Sequence[np.ndarray]], *, is_all: bool
    ) -> "SampledCrossEntropy":
        """The cross-entropy from the targets of some batches, in sequences."""
        ids = [np.concatenate(each) for each in batches if each]
        bare = cls(place, value, np.bincount(np.concatenate(ids)), len(batches), is_all)
        sizes = np.array([len(each) for each in ids])
        mean = float(np.average([bare._under(each, is_counted=True) for each in ids], weights=sizes))
        return cls(place, value, bare.counts, bare.num, is_all, mean)

    def __call__(self, number: int, batch: Batch) -> float | None:
        """The cross-entropy of batch `number`, from 0; None if it has no targets."""
        sequences = self.place.sequences(batch)
        if not sequences:
            return None
        found = self._under(np.concatenate(sequences), is_counted=self.is_all or number < self.num)
        return self.value + self.place.factor * self.place.unit * (found - self.mean)

    def _under(self, ids: np.ndarray, *, is_counted: bool) -> float:
        """Mean cross-entropy of ids (N,) under the frequencies of the sample, but for theirs in it."""
        size = len(self.counts) + 1  # one for all ids that the sample has not met
        known = np.minimum(ids, size - 1)
        seen = np.append(self.counts, 0)[known]
        total = int(self.counts.sum())
        if is_counted:
            seen, total = seen - np.bincount(known)[known], total - len(ids)
        shares = (seen + UNSEEN) / (total + UNSEEN * size)
        smooth = self.place.smoothing
        if smooth:
            shares = (1 - smooth) * shares + smooth / self.place.width
        return float(-(1 - smooth) * np.log(shares).mean())
