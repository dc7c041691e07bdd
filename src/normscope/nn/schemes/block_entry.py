"""Joins that keep the block's input: B2T and parallel branches.

Shapes: B batch, T tokens, D width.
"""

from torch import Tensor, nn

from normscope.nn.joins import Built, Norm, Site, State, Update, two_streams
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Scheme


class BlockEntry(nn.Module):
    """Base class: inside a block the state is (x, entry), the stream and the block's input; else it is x."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.first = site.where.index == 0
        self.last = site.where.index == site.where.per_block - 1

    def open(self, state: State) -> tuple[Tensor, Tensor]:
        """(x, entry)."""
        if self.first:
            assert isinstance(state, Tensor)
            return state, state
        return two_streams(state)

    def close(self, x_BTD: Tensor, entry_BTD: Tensor) -> State:
        """(x, entry); only x after the block's last branch."""
        return x_BTD if self.last else (x_BTD, entry_BTD)


class BottomToTopSum(BlockEntry):
    """N(x + F(x)); at the block's last branch N(entry + x + F(x)): a = N(x + Attn(x)), N(x + a + FFN(a))."""

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """The next state."""
        x_BTD, entry_BTD = self.open(state)
        sum_BTD = x_BTD + update(x_BTD)
        if self.last and not self.first:
            sum_BTD = entry_BTD + sum_BTD
        return self.close(norm(sum_BTD), entry_BTD)


class ParallelSum(BlockEntry):
    """x + F(entry): every branch reads the block's input. A stream norm follows the last branch."""

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """The next state."""
        x_BTD, entry_BTD = self.open(state)
        sum_BTD = x_BTD + update(entry_BTD)
        return self.close(norm(sum_BTD) if self.last else sum_BTD, entry_BTD)


B2T = Scheme(
    "b2t",
    "a = N(x + Attn(x)); N(x + a + FFN(a))",
    norms_at(Slot.STREAM),
    "Takase et al. 2022, arXiv:2206.00330",
    join=Built("add", BottomToTopSum),
    initialisation=Initialisation("xavier"),
)
PARALLEL = Scheme(
    "parallel",
    "x + Attn(N(x)) + FFN(N(x)), a norm for each",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Wang and Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022 (PaLM), arXiv:2204.02311",
    join=Built("add", ParallelSum),
)
