"""Deep stacks without norms, by their initial weights alone: Fixup and T-Fixup.

Shapes: B batch, T tokens, D width.
"""

from types import MappingProxyType

import torch
from torch import Tensor, nn

from normscope.nn.joins import Built, Norm, Update
from normscope.nn.placement import Where, norms_at, zero
from normscope.nn.scheme import Initialisation, Scheme


class FixupSum(nn.Module):
    """N(x + sF(x + b)) with one learnt number each, s from 1 and b from 0.

    The paper's scalar biases inside a branch are part of the bias vectors of its linear maps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        return norm(torch.addcmul(x_BTD, self.scale, update(x_BTD + self.shift)))


def num_branches(where: Where) -> int:
    """L of Fixup: number of branches between input and output, including the other stack's."""
    if where.stack == "single":
        return where.num_sublayers
    # Two branches in an encoder's block, three in a decoder's.
    return where.num_sublayers + where.num_other_blocks * (3 if where.stack == "encoder" else 2)


def attention_gain(where: Where) -> float:
    """L^(-1/(2m-2)) for m = 4 maps: q, k, v, o."""
    return num_branches(where) ** (-1 / 6)


def feed_forward_gain(where: Where) -> float:
    """L^(-1/(2m-2)) for m = 2 maps: up, down. A gate counts as part of the activation."""
    return num_branches(where) ** (-1 / 2)


def _by_9n(where: Where) -> float:
    return (9 * where.num_blocks) ** -0.25


def t_fixup_gain(where: Where) -> float:
    """.67 N^-¼ without cross-attention, as in the paper's encoder; (9N)^-¼ with it, as in its decoder."""
    return _by_9n(where) if where.per_block == 3 else 0.67 * where.num_blocks**-0.25


FIXUP = Scheme(
    "fixup",
    "x + sF(x + b), s = 1 and b = 0 at the start; weights × L^(-1/(2m-2)), the last of a branch 0",
    norms_at(),
    "Zhang et al. 2019, arXiv:1901.09321; L branches, m maps in a branch",
    join=Built("learnt", lambda site: FixupSum()),
    initialisation=Initialisation(
        "xavier",
        MappingProxyType(
            {
                **dict.fromkeys(("q", "k", "v"), attention_gain),
                "o": zero,
                "up": feed_forward_gain,
                "down": zero,
            }
        ),
    ),
)
T_FIXUP = Scheme(
    "t-fixup",
    "x + F(x); weights of v, o and the feed-forward × .67N^-¼, with cross-attention × (9N)^-¼",
    norms_at(),
    "Huang et al. 2020, ICML (Improving Transformer Optimization Through Better Initialization); N blocks",
    initialisation=Initialisation(
        "xavier",
        MappingProxyType(dict.fromkeys(("v", "o", "up", "gate", "down"), t_fixup_gain)),
        embedding=_by_9n,
    ),
    reads_as="residual-no-norm",
)
