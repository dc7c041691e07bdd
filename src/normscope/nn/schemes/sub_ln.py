"""Sub-LN (Wang et al. 2022, Magneto, arXiv:2210.06423): Pre-LN with a second norm inside each branch."""

import math
from types import MappingProxyType

from normscope.nn.placement import Slot, Where, norms_at
from normscope.nn.scheme import Initialisation, Inside, Scheme


def gain(where: Where) -> float:
    """√ln 2L for one stack; √(⅓ ln 3M ln 2N) and √ln 3M for encoder N, decoder M; 1 for cross-attention.

    The authors' code (torchscale) does not change cross-attention, which has no inner norm either.
    """
    if where.kind == "cross-attention":
        return 1.0
    if where.stack == "encoder":
        return math.sqrt(math.log(3 * where.num_other_blocks) * math.log(2 * where.num_blocks) / 3)
    return math.sqrt(math.log((3 if where.stack == "decoder" else 2) * where.num_blocks))


SUB_LN = Scheme(
    "sub-ln",
    "x + F(N(x)) with a norm before W_O and before W₂; v, o and the feed-forward × √ln 2L",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Wang et al. 2022 (Magneto), arXiv:2210.06423",
    initialisation=Initialisation(
        "xavier", MappingProxyType({"v": gain, "o": gain, "up": gain, "gate": gain, "down": gain})
    ),
    inside=Inside(before_o=True, before_down=True),
)
