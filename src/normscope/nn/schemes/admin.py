"""Admin (Liu et al. 2020, arXiv:2004.08249): Post-LN whose skip initially outweighs the branches.

Shapes: B batch, T tokens, D width.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.joins import Built, Norm, Update
from normscope.nn.placement import Slot, Where, norms_at
from normscope.nn.scheme import Initialisation, Scheme
from normscope.nn.tensors import wide


def closed_form(where: Where) -> float:
    """ω = √((n+1)/ln(n+1) − 1) for n branches; the output then changes by O(log n) (authors' admin-torch)."""
    n = where.num_sublayers
    return math.sqrt((n + 1) / math.log(n + 1) - 1)


class AdminSum(nn.Module):
    """N(ω⊙x + F(x)), with a learnt vector ω from `start`; `profile_admin` measures a better start."""

    def __init__(self, width: int, start: float, stack: str) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.full((width,), start))
        self.stack = stack

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        return norm(torch.addcmul(update(x_BTD), self.omega, x_BTD))


@torch.no_grad()
def profile_admin(model: nn.Module, batch: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> None:
    """Set every ω of `model` from one forward pass of real data: ω_i² = 1 + Σ_{j<i} Var F_j.

    The sum runs over the earlier branches of the same stack, the variance over all entries of a branch's
    output. Each ω is set before the next branch is measured, as in the authors' Transformer-Clinic. (They use
    the variance of ω_i⊙x instead of ω_i², which is the same if x has just been normed.) Call this after the
    weights are drawn and before training. The forward pass runs in the model's current mode.

    Args:
        model: a model, or any module, with joins of the scheme "admin".
        batch: arguments of the model: one argument, a tuple of them, or a mapping of keywords.

    Raises:
        UsageError: the model has no such joins, or a branch's output is not finite.
    """
    joins = [module for module in model.modules() if isinstance(module, AdminSum)]
    if not joins:
        raise UsageError(
            "a model without Admin's ω", 'a model of scheme "admin"', "build it with scheme=admin"
        )
    before = [join.omega.clone() for join in joins]
    total: dict[str, Tensor | float] = defaultdict(lambda: 1.0)
    handles = [join.register_forward_pre_hook(_measure(total)) for join in joins]
    try:
        _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not all(torch.as_tensor(variance).isfinite() for variance in total.values()):
        for join, omega in zip(joins, before, strict=True):
            join.omega.copy_(omega)
        raise UsageError("a branch whose output is not finite", "finite outputs", "check the weights")


Hook = Callable[[nn.Module, tuple[Tensor, Update, Norm]], tuple[Tensor, Update, Norm]]


def _measure(total: dict[str, Tensor | float]) -> Hook:
    """A hook that runs the branch once, sets ω from the earlier branches, and adds this branch's variance."""

    def measure(join: nn.Module, args: tuple[Tensor, Update, Norm]) -> tuple[Tensor, Update, Norm]:
        assert isinstance(join, AdminSum)
        x_BTD, update, norm = args
        f_BTD = update(x_BTD)
        join.omega.copy_(torch.as_tensor(total[join.stack]).sqrt())
        total[join.stack] = total[join.stack] + wide(f_BTD).var(correction=0)
        return x_BTD, lambda _: f_BTD, norm

    return measure


def _call(model: nn.Module, batch: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*(batch if isinstance(batch, tuple) else (batch,)))


ADMIN = Scheme(
    "admin",
    "N(ω⊙x + F(x)), ω = √((n+1)/ln(n+1) − 1) at the start, n branches, or ω_i² = 1 + Σ_{j<i} Var F_j",
    norms_at(Slot.STREAM),
    "Liu et al. 2020, arXiv:2004.08249",
    join=Built("learnt", lambda site: AdminSum(site.width, closed_form(site.where), site.where.stack)),
    initialisation=Initialisation("xavier"),
)
