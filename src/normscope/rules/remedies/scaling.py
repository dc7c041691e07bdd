"""Remedy of the scales: DeepNorm's α and β on any Post-LN model.

N(αx + F(x)) is N(x + F(x)/α) with ε/α² as its ε, because a norm does not depend on the scale of its input. So
the branches' last maps are divided by α, as a factor that no step changes, and nothing else is changed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normscope.anatomy import Anatomy, Branch, Projection, Stack, capture, measuring
from normscope.nn.placement import Where
from normscope.nn.schemes.deepnorm import alpha, beta
from normscope.probes.roles import role_masks
from normscope.rules.remedies.norms import set_eps
from normscope.rules.remedies.ours import is_ours, rebuilt
from normscope.rules.remedies.remedy import (
    NotApplicable,
    holder,
    model_remedy,
    modules_of,
    multiply,
    parameters_of,
    projections,
    require_blocks,
    with_copy,
)
from normscope.subjects import Subject


@model_remedy(
    "deepnorm",
    summary="Post-LN with DeepNorm's scales: N(αx + F(x)), the weights of v, o and the feed-forward × β.",
    code="x = norm(alpha * x + branch(x)), alpha = (2 * L) ** 0.25; w.data.mul_((8 * L) ** -0.25) for v, o, "
    'up and down; nn:…,scheme=deepnorm; normscope.nn.swap(model, "deepnorm")',
    cost="one multiplication per branch",
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555",
    reach=2,
)
def deepnorm(subject: Subject, anatomy: Anatomy) -> Subject:
    require_blocks(anatomy)
    for branch in anatomy.branches:
        if branch.placement != "post":
            raise NotApplicable(f"DeepNorm scales Post-LN, and {branch.site} is {branch.placement}")
        if branch.join != "add":
            raise NotApplicable(f"{branch.site} has scales of its own ({branch.join})")
    if is_ours(subject.model):
        return rebuilt(subject, scheme="deepnorm")
    changed = with_copy(subject)
    scale_as_deepnorm(changed, anatomy)
    return changed


def scale_as_deepnorm(subject: Subject, anatomy: Anatomy) -> None:
    """Put α and β into a model with Post-LN weights."""
    values = _value_rows(subject, anatomy)
    parameters = parameters_of(subject.model)
    last_maps: dict[int, tuple[nn.Module, float]] = {}
    for stack in anatomy.stacks:
        where = _where(stack, anatomy)
        shrink = beta(where)
        for branch in stack.branches:
            ends = list(projections((branch,), "o", "down"))
            if not ends:
                raise NotApplicable(f"the last map of {branch.site} was not found")
            entries = ("up", "gate") if branch.kind == "feed-forward" else ("up",)
            for _, projection in [*ends, *projections((branch,), *entries, whole=False)]:
                multiply(parameters[projection.parameter], shrink)
            for name, rows in values.get(branch.site, {}).items():
                _multiply_rows(parameters[name], rows, shrink)
            for _, projection in ends:
                module, _ = holder(subject.model, projection.parameter)
                last_maps[id(module)] = (module, 1 / alpha(where))
            _same_eps(subject.model, branch, alpha(where))
    for module, factor in last_maps.values():
        _always_times(module, factor)


def _where(stack: Stack, anatomy: Anatomy) -> Where:
    """Key into DeepNorm's table: the stack's depth, and for two stacks its position."""
    depth = len(stack.blocks)
    if len(anatomy.stacks) == 1:
        return Where(1, depth)
    if len(anatomy.stacks) > 2:
        raise NotApplicable(f"DeepNorm has scales for one or two stacks, not {len(anatomy.stacks)}")
    first = stack is anatomy.stacks[0]
    other = len(anatomy.stacks[1 if first else 0].blocks)
    return Where(1, depth, stack="encoder" if first else "decoder", other_depth=other)


def _value_rows(subject: Subject, anatomy: Anatomy) -> dict[str, dict[str, tuple[int, Tensor]]]:
    """Axis and mask of the rows that make values, alone or beside q and k, by branch and parameter."""
    found: dict[str, dict[str, tuple[int, Tensor]]] = {}
    parameters = parameters_of(subject.model)
    makers = list(projections(anatomy.branches, "v", whole=False))
    sites = [projection.output for _, projection in makers]
    sites += [site for branch, _ in makers for a in branch.attention for site in (a.query, a.key, a.value)]
    with measuring(subject.model):
        _, tensors = capture(subject.model, subject.forward, sites)
        for branch, projection in makers:
            weight = parameters[projection.parameter]
            rows = _rows(branch, projection, weight, tensors)
            found.setdefault(branch.site, {})[projection.parameter] = (projection.feature_axis, rows)
    return found


def _rows(branch: Branch, projection: Projection, weight: Tensor, tensors: Any) -> Tensor:
    if projection.roles == ("v",):
        return torch.ones(weight.shape[projection.feature_axis], dtype=torch.bool, device=weight.device)
    masks = role_masks(branch, projection, weight, tensors)
    if "v" not in masks:
        raise NotApplicable(f"the rows of {projection.parameter} that make values were not found")
    return masks["v"]


@torch.no_grad()
def _multiply_rows(weight: nn.Parameter, rows: tuple[int, Tensor], factor: float) -> None:
    axis, mask = rows
    weight.movedim(axis, 0)[mask] *= factor


class Times(nn.Module):
    """W·c with a constant c."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """The scaled weight."""
        return self.factor * weight


def _always_times(module: nn.Module, factor: float) -> None:
    """Multiply the output of a linear map by a factor that the optimiser does not change."""
    names = [name for name in ("weight", "bias") if isinstance(getattr(module, name, None), nn.Parameter)]
    if "weight" not in names:
        raise NotApplicable(f"the last map of a branch is a {type(module).__name__} without a plain weight")
    for name in names:
        parametrize.register_parametrization(module, name, Times(factor))


def _same_eps(model: nn.Module, branch: Branch, skip: float) -> None:
    """N_ε(αx + F) is N with ε/α² of x + F/α."""
    modules = modules_of(model)
    for norm in branch.norms:
        if norm.path in modules:
            set_eps(modules[norm.path], norm.eps / skip**2 if norm.eps is not None else 0.0)
