"""Output of the models of `normscope.nn`.

Shapes: B batch, T tokens, V vocabulary or classes.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from normscope.errors import UsageError
from normscope.nn.tensors import wide

IGNORED = -100
"""The label of a position that does not count in the loss."""


class Output(NamedTuple):
    """Logits, (B, T, V) of text and (B, V) of images; with labels, the mean cross-entropy in nats.

    In train mode the loss contains `config.z_loss`.
    """

    logits: Tensor
    loss: Tensor | None


def with_loss(logits: Tensor, labels: Tensor | None, z_weight: float = 0.0) -> Output:
    """The output with its loss, cross-entropy + z_weight·z-loss.

    Raises:
        UsageError: labels and logits have different shapes.
    """
    if labels is None:
        return Output(logits, None)
    if labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"labels of shape {tuple(labels.shape)}",
            f"{tuple(logits.shape[:-1])}, one for each prediction",
            "reshape them",
        )
    loss = cross_entropy(logits, labels)
    return Output(logits, loss if z_weight == 0 else loss + z_weight * z_loss(logits, labels))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labelled positions in nats, at least in float32; NaN if no position has a label."""
    return F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labelled positions of log² Z, Z = Σ exp(logits), at least in float32.

    It pulls log Z to 0 (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, with weight 1e-4).
    """
    square = wide(logits).logsumexp(dim=-1).square()
    counts = labels != IGNORED
    return square.where(counts, 0.0).sum() / counts.sum()
