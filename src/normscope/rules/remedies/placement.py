"""Remedy that moves the norms: Pre-LN with a final norm, for our models, PyTorch's and any Post-LN model."""

import copy
from typing import Any

from torch import nn

from normscope.anatomy import Anatomy, Branch, read_anatomy
from normscope.rules.remedies.norms import end_in_norm
from normscope.rules.remedies.ours import is_ours, rebuilt
from normscope.rules.remedies.remedy import (
    NotApplicable,
    holder,
    model_remedy,
    modules_of,
    projections,
    put_module,
    require_blocks,
    with_copy,
)
from normscope.subjects import Subject

ENTRIES = ("q", "k", "v", "up", "gate")
"""Roles of the projections that a branch first applies to the stream."""


@model_remedy(
    "pre-ln",
    summary="Every norm inside its branch, x + F(N(x)), and one norm at the end of the stack.",
    code="nn.TransformerEncoderLayer(…, norm_first=True), nn.TransformerEncoder(…, norm=nn.LayerNorm(d)); "
    'nn:…,scheme=pre; normscope.nn.swap(model, "pre")',
    cost="one more norm; at the same loss a trained Post-LN is sometimes a little better",
    source="Xiong et al. 2020, arXiv:2002.04745",
    reach=2,
)
def pre_ln(subject: Subject, anatomy: Anatomy) -> Subject:
    require_blocks(anatomy)
    placements = {branch.placement for branch in anatomy.branches}
    if placements == {"pre"}:
        raise NotApplicable("every norm is inside its branch already")
    if is_ours(subject.model):
        return rebuilt(subject, scheme="pre")
    if placements - {"post"}:
        raise NotApplicable(f"only Post-LN can be moved, and this model has {', '.join(sorted(placements))}")
    changed = with_copy(subject)
    layers = [m for m in changed.model.modules() if isinstance(m, TORCH_LAYERS)]
    blocks = [modules_of(changed.model).get(block.path) for block in anatomy.blocks]
    if blocks and all(any(block is layer for layer in layers) for block in blocks):
        _turn(changed, anatomy, layers)
    else:
        _move(changed, anatomy)
    _require_moved(changed)
    return changed


TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _turn(subject: Subject, anatomy: Anatomy, layers: list[Any]) -> None:
    """Set `norm_first` of PyTorch's layers; give the stack a norm at its end where it has none."""
    for layer in layers:
        layer.norm_first = True
    modules = modules_of(subject.model)
    for stack in anatomy.stacks:
        if stack.final_norm is None:
            end_in_norm(subject, modules[stack.blocks[-1].path])


def _require_moved(subject: Subject) -> None:
    """Read the changed model again and check that it is Pre-LN with a final norm."""
    found = read_anatomy(subject)
    placements = sorted({branch.placement for branch in found.branches})
    if placements != ["pre"] or not found.final_norm:
        raise NotApplicable(f"after moving the norms the model reads as {', '.join(placements) or 'nothing'}")


def _move(subject: Subject, anatomy: Anatomy) -> None:
    """Move each norm of a handwritten Post-LN before its branch's first maps; a copy of the last stays."""
    modules = modules_of(subject.model)
    for stack in anatomy.stacks:
        for branch in stack.branches:
            norm = _only_norm(branch, modules)
            moved = copy.deepcopy(norm)
            _normalise_entry(subject.model, branch, moved)
            if branch is not stack.branches[-1] or stack.final_norm is not None:
                put_module(subject.model, branch.norms[0].path, nn.Identity())


def _only_norm(branch: Branch, modules: dict[str, nn.Module]) -> nn.Module:
    """The module that is the branch's one norm."""
    if len(branch.norms) != 1 or branch.norms[0].path not in modules:
        raise NotApplicable(f"{branch.site} has {len(branch.norms)} norms where one was expected")
    norm = modules[branch.norms[0].path]
    if any(True for _ in norm.children()) or branch.call:
        raise NotApplicable(f"the norm of {branch.site} is not a module of its own")
    return norm


def _normalise_entry(model: nn.Module, branch: Branch, norm: nn.Module) -> None:
    """Normalise the input of the maps that read the stream; in cross-attention that is only the query's."""
    roles = ("q",) if branch.kind == "cross-attention" else ENTRIES
    entries = [projection for _, projection in projections((branch,), *roles, whole=False)]
    if not entries or not {role for p in entries for role in p.roles} <= set(roles):
        raise NotApplicable(f"the first maps of {branch.site} were not found")
    for projection in entries:
        module, _ = holder(model, projection.parameter)
        if "norm_before" not in dict(module.named_children()):
            module.register_module("norm_before", norm)  # one norm, shared by several maps
            module.register_forward_pre_hook(_normalised, with_kwargs=True)


def _normalised(
    module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Normalise the stream among the arguments; keep the other arguments."""
    stream = inputs[0] if inputs else next(iter(options.values()))
    normed = module.get_submodule("norm_before")(stream)
    return (
        tuple(normed if each is stream else each for each in inputs),
        {name: normed if each is stream else each for name, each in options.items()},
    )
