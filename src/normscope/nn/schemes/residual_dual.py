"""ResiDual (Xie et al. 2023, arXiv:2304.14802): a Post-LN and a Pre-LN stream fed by the same branches.

Shapes: B batch, T tokens, D width.
"""

from torch import nn

from normscope.nn.joins import Norm, State, TwoStreams, Update, two_streams
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Scheme


class DualSum(nn.Module):
    """(N(x + F(x)), r + F(x)); x and r start at the embedding, the head reads x + N(r)."""

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
    join=TwoStreams("streams", lambda site: DualSum(), normed=True),
    initialisation=Initialisation("xavier"),
)
