"""Data of the regimes' cases: batches under the names that a model has for them, and the loss to beat."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.regimes import data
from normscope.subjects.subject import LOSS_INPUTS


@dataclass(frozen=True)
class Feed:
    """Data of a case.

    Attributes:
        batches: seed → endless batches.
        baseline: the best loss of a model that ignores its input.
        without_input: the same on one batch.
        loss: None is the model's own.
        is_regression: whether the margin is a share of the baseline.
    """

    batches: Callable[[int], Iterator[Any]]
    baseline: Callable[[], float]
    without_input: Callable[[Any], float]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    is_regression: bool = False


def tokens(text: str, vocabulary: int, key: str, size: int = 4, length: int = 64) -> Feed:
    """Windows of a text; `key` is the model's name for ids, "" for a model that takes them alone."""

    def batches(seed: int) -> Iterator[Any]:
        for ids in data.windows(data.ids_of(text, vocabulary), size, length, seed):
            if not key:
                yield ids
            elif key == "input_ids":
                yield {key: ids, "labels": ids}  # transformers shifts the labels
            else:
                last = torch.full((size, 1), data.IGNORED)
                yield {key: ids, "labels": torch.cat([ids[:, 1:], last], 1)}

    loss = None if key else data.next_token
    return Feed(batches, partial(_entropy, text, vocabulary), partial(_cross_entropy, text, vocabulary), loss)


def masked(text: str, vocabulary: int, key: str, size: int = 8, length: int = 64) -> Feed:
    """Masked windows of a text; the model has one more id, for the mask."""

    def batches(seed: int) -> Iterator[Any]:
        for ids, labels in data.masked(data.ids_of(text, vocabulary), vocabulary, size, length, seed):
            yield {key: ids, "labels": labels}

    return Feed(batches, partial(_entropy, text, vocabulary), partial(_cross_entropy, text, vocabulary))


def pairs(text: str, vocabulary: int, key: str, size: int = 4, length: int = 48) -> Feed:
    """Sources with hidden tokens, and the whole as targets; the decoder's ids are named after `key`."""

    def batches(seed: int) -> Iterator[Any]:
        ids = data.ids_of(text, vocabulary)
        for source, inputs, target in data.pairs(ids, vocabulary, size, length, seed):
            yield {key: source, f"decoder_{key}": inputs, "labels": target}

    return Feed(batches, partial(_entropy, text, vocabulary), partial(_cross_entropy, text, vocabulary))


def digits(kind: str, key: str, size: int = 32) -> Feed:
    """Images of digits and their classes."""

    def batches(seed: int) -> Iterator[Any]:
        for pixels, classes in data.images(kind, size, seed):
            yield {key: pixels, "labels": classes}

    classes = data.digits(kind)[1].numpy()
    return Feed(
        batches,
        lambda: data.entropy_of(classes),
        lambda batch: data.cross_entropy_of(batch["labels"].numpy(), classes),
    )


def series(kind: str, size: int = 8, length: int = 64) -> Feed:
    """Pieces of a series; the loss is the squared error of the next value, and the variance is 1."""

    def batches(seed: int) -> Iterator[Any]:
        for values, targets in data.series(kind, size, length, seed):
            yield {"values": values, LOSS_INPUTS: (targets,)}

    return Feed(batches, lambda: 1.0, _square, data.squared, is_regression=True)


def _entropy(text: str, vocabulary: int) -> float:
    return data.entropy_of(data.ids_of(text, vocabulary))


def _cross_entropy(text: str, vocabulary: int, batch: Any) -> float:
    return data.cross_entropy_of(_targets(batch), data.ids_of(text, vocabulary))


def _targets(batch: Any) -> np.ndarray:
    """The ids (N,) that the loss of a batch asks for; transformers shifts labels that are the ids."""
    labels = batch["labels"] if isinstance(batch, dict) else batch
    if not isinstance(batch, dict) or torch.equal(labels, batch.get("input_ids", labels.new_empty(0))):
        labels = labels[:, 1:]
    return labels[labels != data.IGNORED].numpy()


def _square(batch: Any) -> float:
    return float(batch[LOSS_INPUTS][0].square().mean())
