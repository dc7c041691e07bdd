"""One backward: gradients of parameters and sites, and properties of its graph."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from normscope.anatomy import Anatomy, Branch, Projection, Site
from normscope.probes.added import sites_of_added
from normscope.probes.parameters import Parameters
from normscope.probes.roles import Masks, role_masks
from normscope.probes.rows import Found, at
from normscope.subjects.memory import is_out_of_memory

NO_GRADIENT = "no gradient: the loss does not depend on it"


def differentiated(loss: Tensor, inputs: list[Any]) -> tuple[Tensor | None, ...] | str:
    """∂loss/∂input of every input (tensor or graph edge), or the reason why the backward fails."""
    if not loss.requires_grad:
        return (None,) * len(inputs)
    try:
        return torch.autograd.grad(loss, inputs, allow_unused=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return f"the backward fails in eval mode: {' '.join(str(error).split())[:200]}"


class Backward:
    """Gradients of one loss; the graph is freed once they are computed.

    Attributes:
        captured: the tensors at the sites, without their graph.
        masks: features of a fused projection, by role.
        failure: why the whole backward fails, None where it does not.
        no_gradient: reason for a missing gradient.
        learnt: branch site → ids of the parameters that its output depends on inside the branch.
    """

    def __init__(
        self,
        loss: Tensor,
        captured: Mapping[Site, Tensor],
        anatomy: Anatomy,
        parameters: Parameters,
        sites: Iterable[Site],
    ) -> None:
        self.failure: str | None = None
        self.masks = _all_masks(anatomy, captured, parameters)
        self.learnt = _all_learnt(anatomy, captured, parameters)
        wanted = {site: captured[site] for site in sites if site in captured and captured[site].requires_grad}
        edges = {site: edge for site, t in wanted.items() if (edge := behind_copy(t)) is not None}
        weights = {id(parameter): parameter for parameter in parameters.all()}
        inputs = [*weights.values(), *wanted.values(), *edges.values()]
        found = differentiated(loss, inputs)
        if isinstance(found, str):
            self.failure, found = found, (None,) * len(inputs)
        self.no_gradient = self.failure or NO_GRADIENT
        self._of_weight = dict(zip(weights, found, strict=False))
        self._of_site = dict(zip(wanted, found[len(weights) :], strict=False))
        for site, gradient in zip(edges, found[len(weights) + len(wanted) :], strict=True):
            if self._of_site[site] is None:
                self._of_site[site] = gradient
        self.captured = {site: tensor.detach() for site, tensor in captured.items()}

    def at(self, site: Site) -> Found:
        """∂loss/∂(tensor at `site`), or why there is none."""
        tensor = at(self.captured, site)
        if isinstance(tensor, str):
            return tensor
        gradient = self._of_site.get(site)
        return self.no_gradient if gradient is None else gradient

    def of(self, parameter: Tensor) -> Tensor | None:
        """∂loss/∂parameter, None where the loss does not depend on it."""
        return self._of_weight.get(id(parameter))

    def of_all(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Gradients that exist."""
        found = (self.of(parameter) for parameter in parameters)
        return [gradient for gradient in found if gradient is not None]


def behind_copy(tensor: Tensor) -> GradientEdge | None:
    """Graph edge of the original of a captured copy; None where the tensor is no copy.

    For a tensor that an in-place op (`x += f(x)`) overwrites, `capture` returns a copy that the loss does not
    depend on; the copy's graph leads to the original.
    """
    node = tensor.grad_fn
    if node is None or node.name() != "CloneBackward0":
        return None
    before, output_nr = node.next_functions[0]
    return None if before is None else GradientEdge(before, output_nr)


def _all_masks(
    anatomy: Anatomy, captured: Mapping[Site, Tensor], parameters: Parameters
) -> dict[Projection, Masks]:
    """Masks of every fused projection; blocks of the same structure are examined once."""
    masks: dict[Projection, Masks] = {}
    alike: dict[Any, Masks] = {}
    for branch in anatomy.branches:
        for projection in branch.projections:
            weight = parameters.by_name.get(projection.parameter)
            output = captured.get(projection.output)
            if weight is None or output is None or not is_fused(branch, projection):
                continue
            key = (branch.kind, projection.roles, weight.shape, output.shape[-1], projection.feature_axis)
            if key not in alike:
                alike[key] = role_masks(branch, projection, weight, captured)
            masks[projection] = alike[key]
    return masks


def is_fused(branch: Branch, projection: Projection) -> bool:
    """Whether the projection's weight has several roles in its branch, in one matmul or by slices."""
    same = (p.roles for p in branch.projections if p.parameter == projection.parameter)
    return len({role for roles in same for role in roles}) > 1


def _all_learnt(
    anatomy: Anatomy, captured: Mapping[Site, Tensor], parameters: Parameters
) -> dict[str, set[int]]:
    """Ids of the block's parameters that each branch's output depends on without going through the stream."""
    streams = [site for block in anatomy.blocks for site in (block.entry, block.exit)]
    streams += [branch.entry for branch in anatomy.branches]
    tensors = [captured[site] for site in streams if site in captured]
    stops: set[Any] = {tensor.grad_fn for tensor in tensors}
    stops |= {edge.node for edge in map(behind_copy, tensors) if edge is not None}
    learnt = {}
    for block in anatomy.blocks:
        own = {id(parameter) for parameter in parameters.of_block(block)}
        for branch in block.branches:
            if branch.output in captured:
                factors = [captured[site] for site in sites_of_added(branch) if site in captured]
                learnt[branch.site] = {id(leaf) for t in factors for leaf in _leaves(t, stops)} & own
    return learnt


def _leaves(output: Tensor, stops: set[Any]) -> Iterator[Tensor]:
    """Leaf tensors that `output` depends on, or is, without passing the graph nodes in `stops`."""
    if output.grad_fn is None:
        yield output
    queue: list[Any] = [output.grad_fn]
    seen = {None, *stops}
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad: the end of a path
            yield node.variable
        queue.extend(before for before, _ in node.next_functions)
