"""What a run needs to know of its batches."""

import hashlib

import torch
from torch import Tensor

from normscope.subjects import Batch
from normscope.subjects.feed import map_tensors


def fingerprint(batch: Batch) -> str:
    """A hash of the tensors of a batch: the same text, cut the same way, has the same."""
    digest = hashlib.sha256()
    for tensor in tensors_in(batch):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def num_ids(batch: Batch) -> int | None:
    """Tokens of a batch: entries of its first tensor, where that holds ids."""
    first = next(iter(tensors_in(batch)), None)
    return None if first is None or first.is_floating_point() else first.numel()


def tensors_in(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found
