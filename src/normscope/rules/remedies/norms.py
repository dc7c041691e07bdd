"""Remedies of the norms: a final norm, their ε, float32 inside a model of half precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Norm, measuring
from normscope.rules.remedies.remedy import (
    NotApplicable,
    model_remedy,
    modules_of,
    require_blocks,
    with_copy,
)
from normscope.subjects import Subject

EPS = 1e-5
TINY, LARGE = 1e-8, 1e-4
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
"""Names of the attribute that holds a module's ε."""
HALVES = (torch.float16, torch.bfloat16)


@model_remedy(
    "norm-eps",
    summary=f"ε = {EPS:g} in every norm whose own is at most {TINY:g} or at least {LARGE:g}.",
    code=f"nn.LayerNorm(d, eps={EPS:g})",
    cost="nothing",
    source="a gain of ε/(var + ε)^1.5 along the normed direction; 1e-12 is lost in half precision",
    reach=2,
)
def norm_eps(subject: Subject, anatomy: Anatomy) -> Subject:
    odd = [n for n in norms_of(anatomy) if n.eps is not None and not TINY < n.eps < LARGE]
    if not odd:
        raise NotApplicable(f"every ε that was read lies between {TINY:g} and {LARGE:g}")
    changed = with_copy(subject)
    modules = modules_of(changed.model)
    done = [set_eps(modules[norm.path], EPS) for norm in odd if norm.path in modules]
    if not any(done):
        raise NotApplicable("the norms' ε is not an attribute of their modules")
    return changed


def set_eps(module: nn.Module, eps: float) -> bool:
    """Set the ε of a norm's module; False where it has none."""
    names = [name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)]
    for name in names:
        setattr(module, name, eps)
    return bool(names)


@model_remedy(
    "norms-float32",
    summary="The norms' weights and arithmetic in float32, the rest of the model in its half precision.",
    code="norm.float()  # and norm(x.float()).to(x.dtype) where it is called; or train under torch.autocast",
    cost="two casts per norm",
    source="Micikevicius et al. 2018, arXiv:1710.03740, section 3.3",
    reach=2,
)
def norms_float32(subject: Subject, anatomy: Anatomy) -> Subject:
    changed = with_copy(subject)
    found = [m for m in norm_modules(changed.model, norms_of(anatomy)) if _is_half(m)]
    if not found:
        raise NotApplicable("no norm with weights in half precision was found")
    for module in found:
        module.float()
        module.register_forward_pre_hook(_widen)
        module.register_forward_hook(_narrow)
    return changed


def norms_of(anatomy: Anatomy) -> list[Norm]:
    """Every norm of the reading once, in order."""
    norms = [norm for branch in anatomy.branches for norm in branch.norms]
    norms += [stack.final_norm for stack in anatomy.stacks if stack.final_norm is not None]
    return list({norm.path: norm for norm in norms}.values())


def norm_modules(model: nn.Module, norms: Iterable[Norm]) -> list[nn.Module]:
    """The modules that are norms and nothing else."""
    modules = modules_of(model)
    found = [modules[norm.path] for norm in norms if norm.path in modules]
    return [module for module in found if not any(True for _ in module.children())]


def _is_half(module: nn.Module) -> bool:
    return any(parameter.dtype in HALVES for parameter in module.parameters(recurse=False))


def _widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    first, *rest = inputs
    module.came_in = first.dtype
    return (first.float(), *rest)


def _narrow(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    dtype = module.came_in
    assert isinstance(dtype, torch.dtype)
    return output.to(dtype)


@model_remedy(
    "final-norm",
    summary="A norm after the last block of a stack that ends without one.",
    code="nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(d))  # or x = self.final_norm(x)",
    cost="one more norm",
    source="Xiong et al. 2020, arXiv:2002.04745",
    reach=2,
)
def final_norm(subject: Subject, anatomy: Anatomy) -> Subject:
    require_blocks(anatomy)
    open_stacks = [stack for stack in anatomy.stacks if stack.final_norm is None]
    if not open_stacks:
        raise NotApplicable("every stack ends in a norm")
    if any(branch.placement == "post" for stack in open_stacks for branch in stack.blocks[-1].branches):
        raise NotApplicable("a Post-LN stack ends in the norm of its last branch")
    changed = with_copy(subject)
    modules = modules_of(changed.model)
    for stack in open_stacks:
        if not stack.blocks[-1].path:
            raise NotApplicable("the last block is not a module of its own")
        end_in_norm(changed, modules[stack.blocks[-1].path])
    return changed


def end_in_norm(subject: Subject, block: nn.Module) -> None:
    """Put a LayerNorm after a block, of the width of its output."""
    widths: list[Tensor] = []
    with (
        block.register_forward_hook(lambda module, inputs, output: widths.append(first_tensor(output))),
        torch.no_grad(),
        measuring(subject.model),
    ):
        subject.forward()
    out = widths[-1]
    block.register_module("norm_behind", nn.LayerNorm(out.shape[-1], device=out.device, dtype=out.dtype))
    block.register_forward_hook(_normed)


def _normed(module: nn.Module, inputs: Any, output: Any) -> Any:
    norm = module.get_submodule("norm_behind")
    if isinstance(output, tuple):
        return (norm(output[0]), *output[1:])
    return norm(output)


def first_tensor(output: Any) -> Tensor:
    """The tensor that a block returns: its output, or the first of several."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor):
        raise NotApplicable(f"a block returns a {type(first).__name__}, not a tensor")
    return first
