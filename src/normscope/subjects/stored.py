"""Place of a loss's targets among the tensors of a batch."""

from collections.abc import Iterator
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

    The last `left_out` positions are no targets. The loss has a share of label smoothing over `width` ids,
    and is `factor` times the mean of the targets, which is near 1, or `unit` times.
    """

    index: int
    shift: int
    ignored: int
    smoothing: float = 0.0
    width: int = 0
    factor: float = 1.0
    unit: float = 1.0
    left_out: int = 0

    def number(self, batch: Batch) -> int:
        """Number of ids in the tensor that are not `ignored`, also before `shift`."""
        return int((tensors_in(batch)[self.index] != self.ignored).sum())

    def count(self, batch: Batch) -> int:
        """Number of targets in a batch."""
        return sum(map(len, self.sequences(batch)))

    def sequences(self, batch: Batch) -> list[np.ndarray]:
        """The targets of a batch, one array (N,) for each sequence, or for each sample with one target."""
        tensor = tensors_in(batch)[self.index]
        if tensor.ndim < 2:
            tensor = tensor.reshape(-1, 1)
        else:
            tensor = tensor[..., self.shift : tensor.shape[-1] - self.left_out].flatten(0, -2)
        rows = (row[row != self.ignored] for row in tensor.cpu().numpy())
        return [row for row in rows if row.size]


def stored(batch: Batch, targets: Tensor) -> Stored | None:
    """Place of `targets` (N,), in their order, among the tensors of a batch; None if they are in none.

    Ids that do not count are `IGNORED`, or one other id, such as that of padding. Where the targets are not
    all ids, nor all but the first of each sequence, they may be those of one window of the positions.
    """
    wanted = targets.cpu().numpy()
    held = {index: tensor for index, tensor in enumerate(tensors_in(batch)) if _may_hold_ids(tensor)}
    for index, tensor in held.items():
        for shift in (0, 1) if tensor.ndim > 1 else (0,):
            ids = tensor.cpu().numpy()[..., shift:].reshape(-1)
            other = np.setdiff1d(ids, wanted)
            ignored = int(other[0]) if len(other) == 1 else IGNORED
            if len(other) < 2 and np.array_equal(ids[ids != ignored], wanted):
                return Stored(index, shift, ignored)
    found = [place for index, tensor in held.items() for place in _windows(index, tensor, wanted)]
    is_one = len({(place.shift, place.left_out) for place in found}) == 1
    return found[0] if is_one else None  # ids that repeat may hold the targets by chance


def _may_hold_ids(tensor: Tensor) -> bool:
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return bool(tensor.ndim) and not is_real and tensor.dtype is not torch.bool


def _windows(index: int, tensor: Tensor, wanted: np.ndarray) -> Iterator[Stored]:
    """Places where the ids at the same positions of all sequences of a tensor are those `wanted`."""
    if tensor.ndim < 2 or not tensor.numel():
        return
    rows = tensor.cpu().numpy().reshape(-1, tensor.shape[-1])
    width, rest = divmod(len(wanted), len(rows))
    if rest or not width:
        return
    goal = wanted.reshape(len(rows), width)
    for shift in range(rows.shape[1] - width + 1):
        if np.array_equal(rows[:, shift : shift + width], goal):
            yield Stored(index, shift, IGNORED, left_out=rows.shape[1] - width - shift)
