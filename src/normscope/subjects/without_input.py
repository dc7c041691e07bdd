"""The loss of one batch without the input, for the data that normscope feeds."""

from dataclasses import dataclass

import numpy as np

from normscope.subjects.subject import Batch
from normscope.subjects.targets import targets_of


@dataclass(frozen=True, eq=False)
class CrossEntropyOfCounts:
    """Mean cross-entropy in nats of a batch's targets under their frequencies in all data.

    Attributes:
        counts: occurrences of each target in all data, (V,).
    """

    counts: np.ndarray

    def __call__(self, number: int, batch: Batch) -> float | None:
        """The cross-entropy; None if a target does not occur in the data, or there are none."""
        targets = targets_of(batch)
        if targets is None or not targets.numel() or int(targets.max()) >= len(self.counts):
            return None
        found = self.counts[targets.cpu().numpy()]
        return float(np.log(self.counts.sum() / found).mean()) if found.all() else None
