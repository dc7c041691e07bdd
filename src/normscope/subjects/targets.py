"""Targets of a batch: the ids that its loss predicts, and the entropy of their frequencies."""

from collections.abc import Mapping

import torch
from torch import Tensor

from normscope.nn.output import IGNORED
from normscope.subjects.feed import tensors_in
from normscope.subjects.guess import LABEL_NAMES
from normscope.subjects.subject import Batch


def targets_of(batch: Batch) -> Tensor | None:
    """Ids (N,) that the loss of a batch predicts; None where it holds no ids.

    The labels that count, one place on where they repeat the ids (the model shifts them); without labels, the
    next ids.
    """
    tensors = tensors_in(batch)
    named = batch if isinstance(batch, Mapping) else {}
    labels = next((named[name] for name in LABEL_NAMES if isinstance(named.get(name), Tensor)), None)
    if labels is None:
        labels = tensors[0][:, 1:] if tensors and tensors[0].ndim == 2 else None
    elif labels.ndim == 2 and any(each is not labels and torch.equal(each, labels) for each in tensors):
        labels = labels[:, 1:]
    if labels is None or labels.is_floating_point() or labels.is_complex():
        return None
    return labels[labels != IGNORED].flatten()


def batch_entropy(batch: Batch) -> float | None:
    """Unigram entropy in nats of the targets of a batch; None where it holds no ids.

    This is the least loss on that batch of a model that ignores its input. A batch is a small sample: its
    entropy is under that of the whole text.
    """
    targets = targets_of(batch)
    if targets is None or targets.numel() == 0:
        return None
    _, counts = targets.unique(return_counts=True)
    shares = counts.double() / counts.sum()
    return max(0.0, -float((shares * shares.log()).sum()))
