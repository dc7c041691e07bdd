"""The entropy to beat of a single batch, from a sample of the targets.

A batch is compared with the frequencies of the sample without its own sequences: they would make it look
easier than a batch that is not in the sample. What rare ids add to every batch is subtracted again.

Shapes: N targets, V ids of the sample.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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
        sequences: number of times that each sequence is in the sample, by its hash.
        mean: mean cross-entropy of the sample's batches, each under the frequencies of the others.
    """

    place: Stored
    value: float
    counts: np.ndarray
    sequences: Counter[int]
    mean: float = 0.0

    @classmethod
    def of(
        cls, place: Stored, value: float, batches: Sequence[Sequence[np.ndarray]]
    ) -> "SampledCrossEntropy":
        """The cross-entropy from the targets of some batches, in sequences."""
        batches = [each for each in batches if each]
        sequences = [row for rows in batches for row in rows]
        hashes = Counter(hash(row.tobytes()) for row in sequences)
        bare = cls(place, value, np.bincount(np.concatenate(sequences)), hashes)
        sizes = [sum(map(len, each)) for each in batches]
        mean = float(np.average([bare._under(each) for each in batches], weights=sizes))
        return cls(place, value, bare.counts, hashes, mean)

    def __call__(self, batch: Batch) -> float | None:
        """The cross-entropy of a batch; None if it has no targets."""
        sequences = self.place.sequences(batch)
        if not sequences:
            return None
        return self.value + self.place.factor * self.place.unit * (self._under(sequences) - self.mean)

    def _in_sample(self, sequences: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """The sequences that are in the sample too, each as often as it is there, at most."""
        seen: Counter[int] = Counter()
        for row in sequences:
            seen[key := hash(row.tobytes())] += 1
            if seen[key] <= self.sequences[key]:
                yield row

    def _under(self, sequences: Sequence[np.ndarray]) -> float:
        """Mean cross-entropy of sequences under the frequencies of the sample without them."""
        size = len(self.counts) + 1  # one for all ids that the sample has not met
        known = np.minimum(np.concatenate(sequences), size - 1)
        own = list(self._in_sample(sequences))
        counted = np.concatenate(own) if own else known[:0]
        left = np.append(self.counts, 0) - np.bincount(counted, minlength=size)
        shares = (left[known] + UNSEEN) / (left.sum() + UNSEEN * size)
        smooth = self.place.smoothing
        if smooth:
            shares = (1 - smooth) * shares + smooth / self.place.width
        return float(-(1 - smooth) * np.log(shares).mean())
