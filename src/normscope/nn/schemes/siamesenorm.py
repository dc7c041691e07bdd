"""SiameseNorm (Li et al. 2026, arXiv:2602.08064): each branch reads and feeds a Post-LN and a Pre-LN stream.

Shapes: B batch, T tokens, D width.
"""

from torch import nn

from normscope.nn.joins import Norm, Site, State, TwoStreams, Update, two_streams
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme


class SiameseSum(nn.Module):
    """o = F(X + N(Y)); X ← N(X + o/√(2l)), Y ← Y + o, l the block; the head reads X + N(Y).

    1/√(2l) as in the authors' code, the same for both branches of a block. That code norms X before a branch
    reads it where ours does after the add: its first norm is the one at the entry here, which only X passes.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.inner, self.branch_scale = site.make_norm(site.width), (2 * site.where.block) ** -0.5

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
    join=TwoStreams("streams", SiameseSum, normed=False),
)
