"""Helpers for batches: number of ids, shares of processes, labels."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.nn.output import IGNORED
from normscope.subjects import Batch
from normscope.subjects.feed import map_tensors, tensors_in


def num_ids(batch: Batch) -> int | None:
    """Number of tokens of a batch: the entries of its first tensor; None if that holds no ids."""
    first = next(iter(tensors_in(batch)), None)
    return None if first is None or first.is_floating_point() else first.numel()


def require_share(batch: Batch, size: int) -> None:
    """Raise UsageError if `size` processes cannot share a batch evenly."""
    rows = _num_rows(batch)
    if rows % size:
        raise UsageError(
            f"a batch of {rows} sequences for {size} processes",
            "the same number of sequences for each process",
            f"make --batch-size a multiple of {size}",
        )


def share_of(batch: Batch, rank: int, size: int) -> Batch:
    """Part `rank` of `size` of the sequences; a tensor of another length is not divided."""
    rows = _num_rows(batch)
    part = rows // size

    def cut(tensor: Tensor) -> Tensor:
        return tensor[rank * part : (rank + 1) * part] if tensor.ndim and len(tensor) == rows else tensor

    return cast(Batch, map_tensors(cut, batch))


def with_a_label(batch: Batch, share: Batch, size: int) -> tuple[Batch, float]:
    """`share` and the weight of its mean loss, so that the mean over all shares is the mean over all labels.

    A share without labels that count would have the mean loss 0/0 = nan, even times a weight of zero. It
    therefore gets labels, and weight zero. If the labels are floats or are not called "labels", each share
    has the same weight.
    """
    labels, own = _labels(batch), _labels(share)
    if labels is None or own is None:
        return share, 1.0
    counted, all_counted = (int((each != IGNORED).sum()) for each in (own, labels))
    if counted == 0 < all_counted:
        return {**cast(Mapping, share), "labels": torch.zeros_like(own)}, 0.0
    return share, counted * size / max(1, all_counted)


def _num_rows(batch: Batch) -> int:
    """Number of sequences of a batch: the rows of its first tensor."""
    return len(tensors_in(batch)[0])


def _labels(batch: Batch) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None
