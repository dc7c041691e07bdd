"""SiameseNorm (Li et al. 2026, arXiv:2602.08064): each branch reads and feeds a Post-LN and a Pre-LN stream.

Shapes: B batch, T tokens, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from normscope.nn.joins import Join, Norm, Site, State, Update, two_streams
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme


@dataclass(frozen=True)
class Siamese(Join):
    """o = F(X + N(Y)); X ← N(X + o/√(2l)), Y ← Y + o, l the block; the head reads X + N(Y).

    1/√(2l) as in the authors' code, the same for both branches of a block. That code norms X before a branch
    reads it where ours does after the add: its first norm is the one at the entry here, which only X passes.
    """

    kind: ClassVar[str] = "streams"

    def build(self, site: Site) -> nn.Module:
        """The module, with a norm of its own for Y."""
        return SiameseSum(site.make_norm(site.width), (2 * site.where.block) ** -0.5)

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """(X, Y) = (N(x_0), x_0)."""
        return entry_norm(x_BTD), x_BTD

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """X + N(Y)."""
        x_BTD, y_BTD = two_streams(state)
        return x_BTD + final_norm(y_BTD)


class SiameseSum(nn.Module):
    """(N(X + o/√(2l)), Y + o)."""

    def __init__(self, inner: nn.Module, branch_scale: float) -> None:
        super().__init__()
        self.inner, self.branch_scale = inner, branch_scale

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """Two streams (B, T, D) → two."""
        x_BTD, y_BTD = two_streams(state)
        o_BTD = update(x_BTD + self.inner(y_BTD))
        return norm(x_BTD.add(o_BTD, alpha=self.branch_scale)), y_BTD + o_BTD


SIAMESENORM = Scheme(
    "siamesenorm",
    "o = F(N(X + N(Y))); X ← N(X + o/√(2l)), Y ← Y + o; out X + N(Y)",
    norms_at(Slot.ENTRY, Slot.BRANCH_IN, Slot.STREAM, Slot.FINAL),
    "Li et al. 2026, arXiv:2602.08064",
    join=Siamese(),
)
