"""Place of a loss's targets among the tensors of a batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from normscope.nn.output import IGNORED
from normscope.subjects.feed import tensors_in
from normscope.subjects.subject import Batch


@dataclass(frozen=True)
class Stored:
    """Place of the targets in a batch: tensor `index` from position `shift` on, without the ids `ignored`.

    The loss on them has a share of label smoothing over `width` ids, and is `factor` times their mean.
    """

    index: int
    shift: int
    ignored: int
    smoothing: float = 0.0
    width: int = 0
    factor: float = 1.0

    def number(self, batch: Batch) -> int:
        """Number of ids in the tensor that are not `ignored`, also before `shift`."""
        return int((tensors_in(batch)[self.index] != self.ignored).sum())

    def sequences(self, batch: Batch) -> list[np.ndarray]:
        """The targets of a batch, one array (N,) for each sequence, or for each sample with one target."""
        tensor = tensors_in(batch)[self.index]
        tensor = tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor[..., self.shift :].flatten(0, -2)
        rows = (row[row != self.ignored] for row in tensor.cpu().numpy())
        return [row for row in rows if row.size]


def stored(batch: Batch, targets: Tensor) -> Stored | None:
    """Place of `targets` (N,), in their order, among the tensors of a batch; None if they are in none.

    Ids that do not count are `IGNORED`, or one other id, such as that of padding.
    """
    wanted = targets.cpu().numpy()
    for index, tensor in enumerate(tensors_in(batch)):
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or not tensor.ndim:
            continue
        for shift in (0, 1) if tensor.ndim > 1 else (0,):
            ids = tensor.cpu().numpy()[..., shift:].reshape(-1)
            other = np.setdiff1d(ids, wanted)
            ignored = int(other[0]) if len(other) == 1 else IGNORED
            if len(other) < 2 and np.array_equal(ids[ids != ignored], wanted):
                return Stored(index, shift, ignored)
    return None
