"""Rows of a fused weight that make q, k and v.

GPT-2 makes all three with one matmul, grouped-query attention has unequal parts, and models interleave them
differently. The autograd graph decides: an output feature belongs to q where the query operand of the
attention depends on it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from normscope.anatomy import Branch, Projection, Site

OPERANDS = {"q": "query", "k": "key", "v": "value"}

Masks = dict[str, Tensor]  # role → bool mask over the features that the projection's weight makes


def role_masks(
    branch: Branch, projection: Projection, weight: Tensor, captured: Mapping[Site, Tensor]
) -> Masks:
    """Features of `weight` that make each role; roles that cannot be distinguished are left out.

    `captured` holds tensors with their graph, at the projection's output and the attention's operands.
    """
    output = captured.get(projection.output)
    if output is None or output.grad_fn is None or projection.feature_axis >= weight.ndim:
        return {}
    features = _features(output, weight, projection.feature_axis)
    masks = {}
    for role in projection.roles:
        operands = (
            [captured.get(getattr(a, OPERANDS[role])) for a in branch.attention] if role in OPERANDS else []
        )
        rows = [reached(operand, output) for operand in operands if operand is not None]
        if features is not None and rows:
            mask = torch.zeros(weight.shape[projection.feature_axis], dtype=torch.bool, device=weight.device)
            mask[features] = torch.stack(rows).any(0)
            if mask.any():
                masks[role] = mask
    return masks


def _features(output: Tensor, weight: Tensor, axis: int) -> Tensor | None:
    """Indices along the weight's feature axis of the output's features.

    All of them, in order; or the slice that the matmul used (`nn.MultiheadAttention` multiplies with parts of
    its in_proj_weight when query and key differ), found by the non-zero gradient of the output in the weight.
    """
    num_features = weight.shape[axis]
    if output.shape[-1] == num_features:
        return torch.arange(num_features, device=weight.device)
    (gradient,) = torch.autograd.grad(
        output, weight, torch.ones_like(output), retain_graph=True, allow_unused=True
    )
    if gradient is None:
        return None
    used = gradient.movedim(axis, 0).flatten(1).any(1).nonzero().squeeze(1)
    return used if len(used) == output.shape[-1] else None


def reached(operand: Tensor, output: Tensor) -> Tensor:
    """Features of `output` (…, features) that the operand depends on: bool (features,).

    The cotangent is random, because a norm on q would map a constant one to zero.
    """
    if not operand.requires_grad:  # detached
        return torch.zeros(output.shape[-1], dtype=torch.bool, device=output.device)
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(operand.shape, generator=generator).to(operand)
    (gradient,) = torch.autograd.grad(operand, output, cotangent, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros(output.shape[-1], dtype=torch.bool, device=output.device)
    return gradient.reshape(-1, output.shape[-1]).any(0)
