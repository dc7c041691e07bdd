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
    """Logits, (B, T, V) of text and (B, V) of images; with labels, the mean cross-entropy in nats."""

    logits: Tensor
    loss: Tensor | None


def with_loss(logits: Tensor, labels: Tensor | None) -> Output:
    """The output with its loss; UsageError if labels and logits have different shapes."""
    if labels is None:
        return Output(logits, None)
    if labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"labels of shape {tuple(labels.shape)}",
            f"{tuple(logits.shape[:-1])}, one for each prediction",
            "reshape them",
        )
    return Output(logits, cross_entropy(logits, labels))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labelled positions in nats, at least in float32; NaN if no position has a label."""
    return F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
