"""A factory whose batches have labels in only one half, in turns, so that one process's share has none."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def batches() -> Iterator[dict[str, Tensor]]:
    """(4, 16) ids whose first or last two sequences count."""
    generator = torch.Generator().manual_seed(0)
    for number in itertools.count():
        ids = torch.randint(64, (4, 16), generator=generator)
        labels = ids.clone()
        labels[2 * (number % 2) :][:2] = -100
        yield {"ids": ids, "labels": labels}


class Model(nn.Module):
    """A model that returns the mean loss of the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, Iterator[dict[str, Tensor]]]:
    """The model, its own loss and its batches."""
    return Model(), batches()
