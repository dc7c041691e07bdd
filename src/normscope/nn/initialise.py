"""Starting weights of our models."""

import dataclasses
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from normscope.nn.placement import Initialisation, Role, Where

if TYPE_CHECKING:
    from normscope.nn.models import Block, Transformer

NORMAL_STD = 0.02


@torch.no_grad()
def initialise(model: "Transformer", initialisation: Initialisation) -> None:
    """Draw all weights of `model` anew from the global generator. Norms keep γ = 1, β = 0."""
    if initialisation.weights != "torch":
        for module in model.modules():
            _draw(module, initialisation.weights)
    for index, block in enumerate(model.blocks, start=1):
        _scale(cast("Block", block), initialisation, Where(index, len(model.blocks)))


def _draw(module: nn.Module, weights: str) -> None:
    if isinstance(module, nn.Linear):
        if weights == "xavier":
            nn.init.xavier_normal_(module.weight)
        else:
            nn.init.normal_(module.weight, std=NORMAL_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5 if weights == "xavier" else NORMAL_STD)


def _scale(block: "Block", initialisation: Initialisation, where: Where) -> None:
    for role, gain in initialisation.gains.items():
        projection = getattr(block.attention if role in ("q", "k", "v", "o") else block.feed_forward, role)
        projection.weight.mul_(gain(where))


def with_weights(initialisation: Initialisation, weights: str | None) -> Initialisation:
    """The same with other weights (None: as they are); the scheme's gains belong to it and stay."""
    return initialisation if weights is None else dataclasses.replace(initialisation, weights=weights)


__all__ = ["NORMAL_STD", "Role", "initialise", "with_weights"]
