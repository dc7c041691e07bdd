"""Remedy of the logits: a norm on each head's queries and keys.

Shapes: H heads or groups, K width of a head.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from normscope.anatomy import Anatomy, Branch, Projection, Site, capture, measuring
from normscope.rules.remedies.ours import is_ours, rebuilt
from normscope.rules.remedies.remedy import NotApplicable, holder, model_remedy, projections, with_copy
from normscope.subjects import Subject


@model_remedy(
    "qk-norm",
    summary="A norm on each head's queries and keys, so that the attention's logits are bounded.",
    code="q, k = q_norm(q), k_norm(k)  # nn.RMSNorm(head_width) on (…, heads, tokens, head_width); "
    "nn:…,qk_norm=head",
    cost="two norms per attention",
    source="Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023 (ViT-22B), arXiv:2302.05442",
    reach=2,
)
def qk_norm(subject: Subject, anatomy: Anatomy) -> Subject:
    if not any(branch.attention for branch in anatomy.branches):
        raise NotApplicable("no attention was read")
    if is_ours(subject.model):
        model: Any = subject.model
        if model.config.inside().qk_norm is not None:
            raise NotApplicable("queries and keys have a norm already")
        return rebuilt(subject, qk_norm="head")
    changed = with_copy(subject)
    makers = list(projections(anatomy.branches, "q", "k", whole=False))
    widths = _head_widths(changed, makers)
    for branch, projection in makers:
        if len(projection.roles) > 1:
            raise NotApplicable(f"{projection.parameter} makes {', '.join(projection.roles)} in one matmul")
        module, name = holder(changed.model, projection.parameter)
        if not isinstance(module, nn.Linear) or name != "weight":
            raise NotApplicable(f"{projection.parameter} is not the weight of an nn.Linear")
        if branch.call == 0 and "head_norm" not in dict(module.named_children()):
            _norm_heads(module, widths[branch.attention[0].query])
    return changed


def _head_widths(subject: Subject, makers: list[tuple[Branch, Projection]]) -> Mapping[Site, int]:
    """K at each attention's query; NotApplicable where it is normed already, or the query is not found.

    To be normed by head, the attention's query must be the projection's output, transposed and split, up to a
    rotation and a scale.
    """
    queries = [branch.attention[0].query for branch, _ in makers if branch.attention]
    if not queries:
        raise NotApplicable("the maps that make queries and keys were not found")
    outputs = [projection.output for _, projection in makers]
    with measuring(subject.model):
        _, found = capture(subject.model, subject.forward, [*queries, *outputs])
    for branch, projection in makers:
        if not branch.attention or projection.output not in found:
            raise NotApplicable(f"the attention of {branch.site} was not found")
    widths = {query: found[query].shape[-1] for query in queries if query in found}
    for branch, projection in makers:
        if found[projection.output].shape[-1] % widths[branch.attention[0].query]:
            raise NotApplicable(f"{projection.parameter} does not split into heads")
        if projection.roles == ("q",) and _is_normed(found[branch.attention[0].query]):
            raise NotApplicable("queries and keys have a norm already")
    return widths


def _is_normed(query: Tensor) -> bool:
    """True where all queries have the same length, as after an untrained norm."""
    lengths = query.detach().float().norm(dim=-1)
    return bool(lengths.std() < 1e-3 * lengths.mean())


def _norm_heads(module: nn.Linear, head_width: int) -> None:
    norm = nn.RMSNorm(head_width, eps=1e-6, device=module.weight.device, dtype=module.weight.dtype)
    module.register_module("head_norm", norm)
    module.register_forward_hook(_normed_heads)


def _normed_heads(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Normalise each head: (…, H·K) → (…, H·K)."""
    norm = module.get_submodule("head_norm")
    assert isinstance(norm, nn.RMSNorm)
    return norm(output.unflatten(-1, (-1, *norm.normalized_shape))).flatten(-2)
