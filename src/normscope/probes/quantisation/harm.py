"""Harm of rounding: one forward with some places rounded, compared with the forward as it is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.anatomy import Site, measuring, replace
from normscope.anatomy.replacing import Change
from normscope.probes.quantisation.places import Place
from normscope.probes.quantisation.rounding import Rounding, rounded
from normscope.probes.sums import energy, exact, is_finite
from normscope.subjects import Batch, Subject, call_model, untouched
from normscope.subjects.feed import tensors_in

DRAWS = 0
"""Seed before each forward, so that a model that draws random numbers in eval mode has the same ones."""


@dataclass(frozen=True)
class Seen:
    """Output (…) and loss of one forward; the loss is None where none is known."""

    output: Tensor
    loss: float | None


@dataclass(frozen=True)
class Harm:
    """Effect of rounding on the model.

    Attributes:
        change: ‖y' − y‖/‖y‖, y the output as it is and y' the one with something rounded; inf where y' is
            not finite.
        loss: loss with something rounded minus loss as it is; None where no loss is known.
    """

    change: float
    loss: float | None


def output_of(output: Any) -> Tensor:
    """The tensor y of a model's output: the first of floating point with an axis of features.

    Raises:
        ValueError: there is none.
    """
    found = [t for t in tensors_in(output) if t.is_floating_point()]
    for tensor in found:
        if tensor.ndim >= 2:  # a loss may come first
            return tensor
    if found:
        return found[0]
    raise ValueError(f"the model's output, a {type(output).__name__}, holds no floating-point tensor")


def see(
    subject: Subject,
    parameters: Mapping[str, Tensor],
    places: Sequence[Place] = (),
    rounding: Rounding | None = None,
    batch: Batch | None = None,
) -> Seen:
    """One forward in eval mode with all of `places` rounded.

    A place that this forward does not compute is not rounded: rounding can route tokens to other experts.

    Raises:
        ValueError: the output holds no floating-point tensor.
    """
    batch = subject.batch if batch is None else batch
    model = subject.model
    changes: dict[Site, Change] = {}
    if rounding is not None:
        changes = {p.where: (lambda x: rounded(x, rounding)) for p in places if p.where is not None}

    def run() -> tuple[Tensor, float | None]:
        torch.manual_seed(DRAWS)
        output = call_model(model, batch)
        loss = None if subject.loss_fn is None else float(subject.loss_fn(output, batch))
        return output_of(output).detach(), loss

    with untouched(model), measuring(model):
        if rounding is not None:
            _round_weights(parameters, places, rounding)
        (output, loss), _ = replace(model, run, changes)
    return Seen(output, loss)


def _round_weights(parameters: Mapping[str, Tensor], places: Sequence[Place], rounding: Rounding) -> None:
    """Give the places' parameters other storage; `untouched` puts their own back."""
    for name, axis in (weight for place in places for weight in place.weights):
        parameters[name].data = rounded(parameters[name], rounding, axis)


def harm(before: Seen, after: Seen) -> Harm:
    """Effect of what `after` has and `before` has not; ‖y‖ of `before` is not zero."""
    loss = None if before.loss is None or after.loss is None else after.loss - before.loss
    if not is_finite(after.output):
        return Harm(math.inf, loss)
    return Harm((energy(exact(after.output) - exact(before.output)) / energy(before.output)) ** 0.5, loss)
