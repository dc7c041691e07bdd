"""Entropy of the targets' frequencies, found in the gradients of the first steps.

The gradient of a cross-entropy by a row of logits is softmax − target, up to a factor: its most negative
entry is the target, wherever the labels are and however they are shifted or masked. The entropy of the whole
text is estimated from these targets, with an error (`normscope.forecast.entropy`).
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from normscope.forecast.entropy import GROUPS, estimate
from normscope.forecast.targets import LARGEST_ERROR
from normscope.probes.wiring.targets import in_places, targets_in
from normscope.subjects import Batch
from normscope.subjects.feed import tensors_in
from normscope.subjects.targets import num_random_ids

STEPS = 32
"""Steps whose targets are read at most."""
LARGEST = 1 << 24
"""Entries of a gradient that are read: of larger ones, the first sequences."""


class TargetsEntropy:
    """Estimate that grows with each step until it is good enough, or given up.

    Attributes:
        is_over: whether no more steps are wanted.
        reason: why the entropy is not known, "" if it is or may still be.
    """

    def __init__(self) -> None:
        self.is_over, self.reason = False, ""
        self._found: list[NDArray[np.int64]] = []
        self._num_steps = 0

    def see(self, cotangents: Iterable[Tensor], batch: Batch) -> float | None:
        """Enter the targets of a step; the entropy in nats once its error is at most `LARGEST_ERROR`.

        Args:
            cotangents: gradients of the loss by the outputs of the model; the device is waited for.
            batch: arguments of its forward.
        """
        if num_random_ids(batch) is not None:
            self._give_up("the ids look random")
            return None
        found = next(filter(None, (list(_sequences(each, batch)) for each in cotangents)), None)
        if found is None:
            self._give_up("the loss is no cross-entropy of an output of the model")
            return None
        self._found += found
        self._num_steps += 1
        if len(self._found) >= GROUPS:
            result = estimate(self._found)
            if result.error <= LARGEST_ERROR:
                self.is_over, self._found = True, []
                return result.value
        if self._num_steps >= STEPS:
            self._give_up(f"the targets of {STEPS} steps are too few to estimate it")
        return None

    def _give_up(self, reason: str) -> None:
        self.is_over, self.reason, self._found = True, reason, []


def _sequences(cotangent: Tensor, batch: Batch) -> Iterator[NDArray[np.int64]]:
    """The targets of each sequence, or of each sample that has one; none if it is no cross-entropy."""
    if cotangent.ndim < 2 or cotangent.shape[-1] < 2 or not cotangent.numel():
        return
    each = cotangent[0].numel()
    ids = targets_in(cotangent[: max(1, LARGEST // each)].float())
    if ids is None:
        return
    first = next(iter(tensors_in(batch)), None)
    if ids.ndim == 1 and first is not None and first.ndim == 2 and ids.numel() >= first.numel() - len(first):
        placed = in_places(ids, first)
        ids = ids.reshape(1, -1) if placed is None else placed
    rows = ids.reshape(-1, 1) if ids.ndim == 1 else ids.flatten(0, -2)
    for row in rows.cpu().numpy():
        if len(known := row[row >= 0]):
            yield known
