"""First-order estimate of the harm of rounding each place alone, from a few backwards.

The output y changes by about Jε, J its Jacobian by the place's tensor and ε the rounding error there. For
random r ~ N(0, I) the gradient of r·y is g = Jᵀr, and E(g·ε)² = ‖Jε‖². One backward gives g at every place.
The mean over a few r has a large variance, so each tensor is cut into parts, the features of one token or the
inputs of one output feature, whose errors are taken as uncorrelated:

    ‖Jε‖² ≈ mean over r of Σ over parts p of (g_p · ε_p)²
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normscope.anatomy import Site, capture, measuring
from normscope.probes.objective import everything_requires_grad
from normscope.probes.quantisation.harm import DRAWS, output_of
from normscope.probes.quantisation.places import Place
from normscope.probes.quantisation.rounding import Rounding, rounded
from normscope.probes.sums import energy, exact
from normscope.subjects import Subject, untouched

BACKWARDS = 4
"""Random directions r."""

Estimates = dict[tuple[object, Rounding], float]
"""Estimated ‖y' − y‖/‖y‖ by the key of a place and the rounding; absent where no gradient arrives."""


def estimates(
    subject: Subject,
    parameters: Mapping[str, Tensor],
    places: Sequence[Place],
    roundings: Sequence[Rounding],
    backwards: int = BACKWARDS,
) -> Estimates:
    """Estimate of every place and rounding; one forward and `backwards` backwards of the fixed batch.

    The tensors at the places must be finite.
    """
    model = subject.model
    sites = {place.where for place in places if place.where is not None}
    squares: defaultdict[tuple[object, Rounding], float] = defaultdict(float)
    with untouched(model), measuring(model), everything_requires_grad(model, subject.batch):
        torch.manual_seed(DRAWS)
        output, captured = capture(model, subject.forward, sites)
        y = output_of(output)
        if not y.requires_grad:
            return {}
        held = _tensors(places, captured, parameters)
        generator = torch.Generator().manual_seed(subject.seed)
        for index in range(backwards):
            r = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
            tensors = [tensor for _, tensor, _ in held]
            keep = index < backwards - 1
            gradients = torch.autograd.grad(y, tensors, r, retain_graph=keep, allow_unused=True)
            for (key, tensor, axis), gradient in zip(held, gradients, strict=True):
                if gradient is not None:
                    for rounding in roundings:
                        squares[key, rounding] += _square(tensor, gradient, rounding, axis)
    whole = energy(y)
    return {key: (square / backwards / whole) ** 0.5 for key, square in squares.items()}


def _tensors(
    places: Sequence[Place], captured: Mapping[Site, Tensor], parameters: Mapping[str, Tensor]
) -> list[tuple[object, Tensor, int]]:
    """Key, tensor and axis of channels of each tensor that has a gradient, each tensor once."""
    held = {}
    for place in places:
        for name, axis in place.weights:
            held[place.key, name] = (place.key, parameters[name], axis)
        tensor = None if place.where is None else captured.get(place.where)
        if tensor is not None and tensor.requires_grad:
            held[place.key, ""] = (place.key, tensor, -1)
    return list(held.values())


@torch.no_grad()
def _square(tensor: Tensor, gradient: Tensor, rounding: Rounding, axis: int) -> float:
    """Σ over parts of (g·ε)²; a part is one token of an activation, or one output feature of a weight."""
    products = exact(gradient) * (exact(rounded(tensor, rounding, axis)) - exact(tensor))
    if axis >= 0:  # a weight
        parts = products.movedim(axis, 0).flatten(1).sum(1)
    else:
        parts = products.sum(-1) if products.ndim else products
    return float(parts.square().sum())
