"""Targets of a batch: the ids that its loss predicts, and the entropy of their frequencies."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from normscope.nn.output import IGNORED
from normscope.subjects.feed import is_of_tokens, tensors_in
from normscope.subjects.subject import LABEL_NAMES, Batch

Hidden = Literal["", "mask", "random"]
"""Reason why a short trial does not show whether the loss will get under the entropy of the targets: the
input hides them ("mask"), or the ids look random, and the loss on noise stays at it."""

HIDDEN = 0.5
"""Share of the tokens with a target that are the mask, from which a model is a masked one; BERT has 0.8."""
FEWEST_DRAWS = 128  # ids of a batch from which text has clearly more equal pairs than random ids
FEWEST_TARGETS = 8  # targets of a batch below which nothing is said of their inputs
FEWEST_SEQUENCES = 4  # sequences of a batch from which a place that is alike in all is no accident
FEWEST_IDS = 16  # different ids below which an even spread is usual: bases of DNA, digits


def targets_of(batch: Batch) -> Tensor | None:
    """Ids (N,) that the loss of a batch predicts; None where it holds no ids.

    The labels that count, one place on where they repeat the ids (the model shifts them); without labels, the
    next ids.
    """
    tensors, labels = tensors_in(batch), _labels(batch)
    if labels is None:
        labels = tensors[0][:, 1:] if tensors and tensors[0].ndim == 2 else None
    elif labels.ndim == 2 and any(each is not labels and torch.equal(each, labels) for each in tensors):
        labels = labels[:, 1:]
    if labels is None or labels.is_floating_point() or labels.is_complex():
        return None
    return labels[labels != IGNORED].flatten()


def hides_targets(batch: Batch) -> Hidden:
    """Reason why a short trial does not show what the model learns of the targets; "" for none."""
    if _is_masked(batch):
        return "mask"
    return "random" if is_of_tokens(batch) and num_random_ids(batch) is not None else ""


def _is_masked(batch: Batch) -> bool:
    """Whether the input hides what the loss asks for, as in a masked language model.

    Most of the tokens that have a target are then one id, the mask, which is never a target itself.
    """
    tensors, labels = tensors_in(batch), _labels(batch)
    if labels is None or labels.is_floating_point() or not tensors or tensors[0].shape != labels.shape:
        return False
    counted = labels != IGNORED
    seen = tensors[0][counted]
    if seen.numel() < FEWEST_TARGETS or bool(counted.all()):
        return False
    ids, counts = seen.unique(return_counts=True)
    commonest = ids[counts.argmax()]
    return int(counts.max()) >= HIDDEN * seen.numel() and not bool((labels[counted] == commonest).any())


def _labels(batch: Batch) -> Tensor | None:
    """The labels that a batch names; None without."""
    named = batch if isinstance(batch, Mapping) else {}
    return next((named[name] for name in LABEL_NAMES if isinstance(named.get(name), Tensor)), None)


def num_random_ids(batch: Batch) -> int | None:
    """Number of different ids that the batch seems to be drawn from, all equally likely; None if it is not.

    Equal pairs among n uniform draws of V ids number n(n−1)/2V, give or take the root of that. Text has many
    times as many, a table of positions fewer. Small batches, or few different ids, show nothing.
    """
    for ids in map(_varied, tensors_in(batch)):
        if ids.dtype not in (torch.int64, torch.int32) or ids.numel() < FEWEST_DRAWS or int(ids.min()) < 0:
            continue
        count, size = ids.numel(), int(ids.max()) + 1
        _, counts = ids.unique(return_counts=True)
        pairs, expected = float((counts * (counts - 1)).sum()) / 2, count * (count - 1) / 2 / size
        is_even = abs(pairs - expected) <= 4 * math.sqrt(expected) + 2
        return size if is_even and size >= FEWEST_IDS else None
    return None


def _varied(ids: Tensor) -> Tensor:
    """The places at which sequences (B, T) differ: those of delimiters, alike in all, tell nothing of ids."""
    return ids[:, (ids != ids[:1]).any(0)] if ids.ndim == 2 and len(ids) >= FEWEST_SEQUENCES else ids


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
