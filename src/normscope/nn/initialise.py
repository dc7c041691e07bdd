"""Initial weights of the branches, and of the modules outside the blocks."""

import dataclasses
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.linear import SigmaLinear
from normscope.nn.placement import Kind, Rule, Slot, Where
from normscope.nn.residual import Residual
from normscope.nn.scheme import Initialisation, Role
from normscope.nn.weights import WEIGHTS, Draw

ROLES: tuple[Role, ...] = get_args(Role)
Sublayers = Mapping[Kind, tuple[nn.Module, Residual]]


@torch.no_grad()
def initialise_block(
    sublayers: Sublayers,
    places: Mapping[Kind, Where],
    initialisation: Initialisation,
    weights: str | None = None,
    hidden_scale: float = 1.0,
) -> None:
    """Draw the maps of each branch from the global generator, and multiply them by the gains of its place.

    Parameters of norms and joins are not changed, except for the γ that the initialisation names.

    Args:
        sublayers: each branch with its residual.
        places: place of each branch.
        weights: a name of `WEIGHTS` that replaces the initialisation's; the scheme's gains still apply.
        hidden_scale: another factor on all maps, from μP.

    Raises:
        UsageError: a branch is to start at zero, but its maps are divided by their σ (σReparam).
    """
    draw, gains = _way(initialisation, weights)
    for kind, (branch, residual) in sublayers.items():
        if draw is not None:
            for module in branch.modules():
                _draw(module, draw, set())
        for role in ROLES:
            factor = hidden_scale
            for rules in gains:
                factor *= rules[role](places[kind]) if role in rules else 1.0
            if getattr(branch, role, None) is not None and factor != 1:
                _multiply(getattr(branch, role), factor)
        for module in branch.modules():
            if isinstance(module, SigmaLinear):
                module.settle()
        _fill_norms(residual, initialisation.norms)


@torch.no_grad()
def initialise_ends(
    model: nn.Module, first: Where, initialisation: Initialisation, weights: str | None = None
) -> None:
    """Draw the weights of `model` outside its blocks: embeddings, patches, head.

    Args:
        model: a model with its blocks in modules called `blocks`.
        first: place of the first stack, which determines embeddings that two stacks share.
        weights: as for `initialise_block`.
    """
    draw, _ = _way(initialisation, weights)
    gain = initialisation.embedding(first.starting)
    # A tied head keeps the embedding's weights.
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if "blocks" in name.split("."):
            continue
        if draw is not None:
            _draw(module, draw, tied)
        if isinstance(module, nn.Embedding) and gain != 1:
            module.weight.mul_(gain)


def _way(
    initialisation: Initialisation, weights: str | None
) -> tuple[Draw | None, list[Mapping[Role, Rule]]]:
    """Distribution of the initial weights (None: PyTorch's own initialisation), and the gains on them."""
    own = WEIGHTS[initialisation.weights]
    way = own if weights is None else WEIGHTS[weights]
    gains = [initialisation.gains, way.gains]
    if way.draw == "scheme":
        way = dataclasses.replace(own, gains=way.gains)
        gains.append(own.gains)
    return way.draw if isinstance(way.draw, Draw) else None, gains


def _draw(module: nn.Module, draw: Draw, tied: set[int]) -> None:
    """Draw a linear map, whose bias starts at zero, or an embedding."""
    if isinstance(module, nn.Linear | nn.Conv2d):  # the convolution is a linear map of a patch
        num_out, num_in = module.weight.flatten(1).shape
        if id(module.weight) not in tied:
            _fill(module.weight, draw.linear(num_in, num_out), draw.uniform)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        _fill(module.weight, draw.embedding(module.embedding_dim), draw.uniform)


def _fill(weight: Tensor, std: float, uniform: bool) -> None:
    if uniform:
        nn.init.uniform_(weight, -(3**0.5) * std, 3**0.5 * std)
    else:
        nn.init.normal_(weight, std=std)


def _multiply(linear: nn.Linear, factor: float) -> None:
    linear.weight.mul_(factor)
    if factor != 0:
        return
    if isinstance(linear, SigmaLinear):
        raise UsageError(
            "σReparam with branches that start at zero",
            "weights with a σ(W) over 0",
            "choose another init or scheme",
        )
    if linear.bias is not None:
        linear.bias.zero_()


def _fill_norms(residual: Residual, values: Mapping[Slot, float]) -> None:
    """Set γ of the slots that the initialisation names."""
    for slot, value in values.items():
        norm = residual.norms[slot.value] if slot in residual.norms else None
        weight = getattr(norm, "weight", None)
        if isinstance(weight, nn.Parameter):
            weight.fill_(value - getattr(norm, "base", 0.0))
