"""ResiDual (Xie et al. 2023, arXiv:2304.14802): a Post-LN and a Pre-LN stream fed by the same branches.

Shapes: B batch, T tokens, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normscope.nn.joins import Join, Norm, Site, State, Update, two_streams
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Scheme


@dataclass(frozen=True)
class Dual(Join):
    """x ← N(x + F(x)), r ← r + F(x); both start at the embedding, the head reads x + N(r)."""

    kind: ClassVar[str] = "streams"

    def build(self, site: Site) -> nn.Module:
        """The module, which holds nothing."""
        return DualSum()

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """(x, r) = (x_0, x_0)."""
        x_BTD = entry_norm(x_BTD)
        return x_BTD, x_BTD

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """x + N(r)."""
        x_BTD, r_BTD = two_streams(state)
        return x_BTD + final_norm(r_BTD)


class DualSum(nn.Module):
    """(N(x + F(x)), r + F(x))."""

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """Two streams (B, T, D) → two."""
        x_BTD, r_BTD = two_streams(state)
        f_BTD = update(x_BTD)
        return norm(x_BTD + f_BTD), r_BTD + f_BTD


RESIDUAL_DUAL = Scheme(
    "residual-dual",
    "x ← N(x + F(x)), r ← r + F(x); out x + N(r)",
    norms_at(Slot.STREAM, Slot.FINAL),
    "Xie et al. 2023 (ResiDual), arXiv:2304.14802",
    join=Dual(),
    initialisation=Initialisation("xavier"),
)
