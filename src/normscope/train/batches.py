"""What a run needs to know of its batches."""

from typing import cast

from torch import Tensor

from normscope.errors import UsageError
from normscope.nn.output import IGNORED
from normscope.subjects import Batch
from normscope.subjects.feed import map_tensors, tensors_in


def num_ids(batch: Batch) -> int | None:
    """Tokens of a batch: entries of its first tensor, where that holds ids."""
    first = next(iter(tensors_in(batch)), None)
    return None if first is None or first.is_floating_point() else first.numel()


def require_share(batch: Batch, size: int) -> None:
    """UsageError for a batch that `size` processes cannot share evenly."""
    rows = _num_rows(batch)
    if rows % size:
        raise UsageError(
            f"a batch of {rows} sequences for {size} processes",
            "as many sequences for each",
            f"make --batch-size a multiple of {size}",
        )


def share_of(batch: Batch, rank: int, size: int) -> Batch:
    """The `rank`-th of `size` parts of the sequences; a tensor of another length is for all of them."""
    rows = _num_rows(batch)
    part = rows // size

    def cut(tensor: Tensor) -> Tensor:
        return tensor[rank * part : (rank + 1) * part] if tensor.ndim and len(tensor) == rows else tensor

    return cast(Batch, map_tensors(cut, batch))


def weight_of(batch: Batch, rank: int, size: int) -> float:
    """What a share's mean loss counts for, so that the mean over all is that over the batch's labels.

    Labels under another name than "labels", or of floats, count alike.
    """
    labels, own = (_labels(part) for part in (batch, share_of(batch, rank, size)))
    if labels is None or own is None:
        return 1.0
    return int((own != IGNORED).sum()) * size / max(1, int((labels != IGNORED).sum()))


def _num_rows(batch: Batch) -> int:
    """Sequences of a batch: the rows of its first tensor."""
    return len(tensors_in(batch)[0])


def _labels(batch: Batch) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, dict) else None
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None
