"""Norms of an anatomy: their sites, inputs and gains."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from normscope.anatomy import Anatomy, Norm
from normscope.anatomy.types import at_call
from normscope.probes.sums import exact

TOKENWISE = ("layernorm", "rmsnorm", "l2norm")
"""Norms over the features of one token; the others mix tokens, and their Jacobian is not one token's."""


def norms_of(anatomy: Anatomy) -> dict[str, Norm]:
    """Site → every norm on the stream, in the order of the forward; a norm shared by branches counts once.

    The site is the norm's path, with its call behind it. Norms written inline share the path of their module:
    from the second on they are numbered, "block#2".
    """
    norms = [norm for stack in anatomy.stacks for b in stack.blocks for br in b.branches for norm in br.norms]
    norms += [stack.final_norm for stack in anatomy.stacks if stack.final_norm is not None]
    sites: dict[str, Norm] = {}
    seen: Counter[str] = Counter()
    for norm in dict.fromkeys(norms):
        call = norm.output.call if norm.output.module == norm.path else 0
        site = at_call(norm.path, call)
        seen[site] += 1
        sites[site if seen[site] == 1 else f"{site}#{seen[site]}"] = norm
    return sites


def guarded(norm: Norm, entering: Tensor) -> Tensor:
    """Quantity that ε is added to, per token (…,): variance, mean square, or sum of squares; float64."""
    x = exact(entering)
    if norm.kind == "layernorm":
        return x.var(-1, correction=0)
    return x.square().mean(-1) if norm.kind == "rmsnorm" else x.square().sum(-1)


def normalised(norm: Norm, entering: Tensor) -> Tensor:
    """ẑ (…, d) of mean square v/(v + ε): the output before γ and β, float64."""
    x = exact(entering)
    if norm.kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    scale = x.shape[-1] if norm.kind == "l2norm" else 1
    return x * torch.rsqrt((guarded(norm, x) + (norm.eps or 0.0)) / scale).unsqueeze(-1)


def factor(norm: Norm, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The whole factor γ (or 1 + γ), None where there is none."""
    if norm.weight is None:
        return None
    return exact(parameters[norm.weight]) + norm.weight_offset
