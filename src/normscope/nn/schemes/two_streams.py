"""Two streams, Post-LN and Pre-LN, fed by the same branches: ResiDual and SiameseNorm.

Shapes: B batch, T tokens, D width.
"""

from torch import nn

from normscope.nn.joins import Norm, Site, State, TwoStreams, Update, two_streams
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Scheme


class DualSum(nn.Module):
    """(N(x + F(x)), r + F(x)); x and r start at the embedding, and the head reads x + N(r)."""

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """Two streams (B, T, D) → two."""
        x_BTD, r_BTD = two_streams(state)
        f_BTD = update(x_BTD)
        return norm(x_BTD + f_BTD), r_BTD + f_BTD


class SiameseSum(nn.Module):
    """o = F(X + N(Y)); X ← N(X + o/√(2l)), Y ← Y + o, l the block; the head reads X + N(Y).

    1/√(2l) is as in the authors' code, the same for both branches of a block. That code norms X before a
    branch, and this one after the add: its first norm is the entry norm here, which only X passes.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.inner, self.branch_scale = site.make_norm(site.width), (2 * site.where.block) ** -0.5

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """Two streams (B, T, D) → two."""
        x_BTD, y_BTD = two_streams(state)
        o_BTD = update(x_BTD + self.inner(y_BTD))
        return norm(x_BTD.add(o_BTD, alpha=self.branch_scale)), y_BTD + o_BTD


RESIDUAL_DUAL = Scheme(
    "residual-dual",
    "x ← N(x + F(x)), r ← r + F(x); out x + N(r)",
    norms_at(Slot.STREAM, Slot.FINAL),
    "Xie et al. 2023 (ResiDual), arXiv:2304.14802",
    join=TwoStreams("streams", lambda site: DualSum(), normed=True),
    initialisation=Initialisation("xavier"),
)
SIAMESENORM = Scheme(
    "siamesenorm",
    "o = F(N(X + N(Y))); X ← N(X + o/√(2l)), Y ← Y + o; out X + N(Y)",
    norms_at(Slot.ENTRY, Slot.BRANCH_IN, Slot.STREAM, Slot.FINAL),
    "Li et al. 2026, arXiv:2602.08064",
    join=TwoStreams("streams", SiameseSum, normed=False),
)
