"""Remedies of the starting weights: smaller matrices, smaller branches."""

import torch
from torch import nn

from normscope.anatomy import Anatomy
from normscope.nn.weights import NORMAL_STD
from normscope.rules.remedies.remedy import (
    NotApplicable,
    model_remedy,
    multiply,
    parameters_of,
    projections,
    require_blocks,
    with_copy,
)
from normscope.subjects import Subject
from normscope.train.trial import after_step

NEAR = 1.1
"""Factor within which weights count as small already."""


@model_remedy(
    "small-init",
    summary=f"Every matrix and embedding scaled down to a deviation of {NORMAL_STD:g} (GPT-2, BERT).",
    code=f"for p in model.parameters(): p.dim() > 1 and torch.nn.init.normal_(p, std={NORMAL_STD:g})",
    cost="nothing a step; new starting weights",
    source="Radford et al. 2019 (GPT-2); Devlin et al. 2018 (BERT), arXiv:1810.04805",
    reach=1,
)
def small_init(subject: Subject, anatomy: Anatomy) -> Subject:
    changed = with_copy(subject)
    large = [p for p in changed.model.parameters() if _deviation(p) > NEAR * NORMAL_STD]
    if not large:
        raise NotApplicable(f"no matrix has a deviation over {NORMAL_STD:g}")
    for parameter in large:
        multiply(parameter, NORMAL_STD / _deviation(parameter))
    _settle(changed.model)
    return changed


@model_remedy(
    "branch-scale",
    summary="The last map of every branch × 1/√(2L), so that the sum of the branches starts as large as one.",
    code="for w in (attention.out_proj.weight, mlp.down.weight): w.data.mul_((2 * num_layers) ** -0.5)",
    cost="nothing a step; new starting weights",
    source="Radford et al. 2019 (GPT-2); Zhang et al. 2019 (Fixup), arXiv:1901.09321",
    reach=1,
)
def branch_scale(subject: Subject, anatomy: Anatomy) -> Subject:
    require_blocks(anatomy)
    changed = with_copy(subject)
    parameters = parameters_of(changed.model)
    done: set[int] = set()
    for stack in anatomy.stacks:
        factor = max(1, len(stack.branches)) ** -0.5
        for branch, projection in projections(stack.branches, "o", "down"):
            weight = parameters[projection.parameter]
            others = [parameters[p.parameter] for p in branch.projections if p is not projection]
            if id(weight) not in done and not _is_small(weight, others, factor):
                multiply(weight, factor)
                done.add(id(weight))
    if not done:
        raise NotApplicable("the branches' last maps start that small already, or were not found")
    _settle(changed.model)
    return changed


def _is_small(weight: nn.Parameter, others: list[nn.Parameter], factor: float) -> bool:
    """True where a last map's size is nearer to `factor` times its branch's other maps, in logarithms."""
    sizes = sorted(_deviation(other) for other in others)
    return bool(sizes) and _deviation(weight) < factor**0.5 * sizes[len(sizes) // 2]


@torch.no_grad()
def _deviation(parameter: nn.Parameter) -> float:
    """RMS of a matrix; 0 of a vector, which is a gain or a bias."""
    if parameter.dim() < 2 or not parameter.is_floating_point():
        return 0.0
    return float(parameter.detach().float().square().mean().sqrt())


def _settle(model: nn.Module) -> None:
    """Recompute σ of maps that are divided by it, and renormalise models on a sphere."""
    for module in model.modules():
        settle = getattr(module, "settle", None)
        if callable(settle):
            settle()
    if not callable(getattr(model, "settle", None)):  # after_step of our models also counts a step
        after_step(model)
