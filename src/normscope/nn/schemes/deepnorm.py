"""DeepNorm (Wang et al. 2022, arXiv:2203.00555): Post-LN with a larger skip and smaller weights."""

from types import MappingProxyType

from normscope.nn.joins import Scaled
from normscope.nn.placement import Slot, Where, norms_at
from normscope.nn.scheme import Initialisation, Scheme


def alpha(where: Where) -> float:
    """α of the paper's table: (2L)^¼ for one stack; .81 (N⁴M)^1/16 and (3M)^¼ for N and M blocks of two."""
    if where.stack == "encoder":
        return 0.81 * _both(where) ** (1 / 16)
    return (3 * where.num_blocks) ** 0.25 if where.stack == "decoder" else (2 * where.num_blocks) ** 0.25


def beta(where: Where) -> float:
    """β: (8L)^-¼; .87 (N⁴M)^-1/16 and (12M)^-¼."""
    if where.stack == "encoder":
        return 0.87 * _both(where) ** (-1 / 16)
    return (12 * where.num_blocks) ** -0.25 if where.stack == "decoder" else (8 * where.num_blocks) ** -0.25


def _both(where: Where) -> float:
    return where.num_blocks**4 * where.num_other_blocks


DEEPNORM = Scheme(
    "deepnorm",
    "N(αx + F(x)), α = (2L)^¼; weights of v, o and the feed-forward × β = (8L)^-¼",
    norms_at(Slot.STREAM),
    "Wang et al. 2022, arXiv:2203.00555",
    join=Scaled(stream_scale=alpha),
    initialisation=Initialisation(
        "xavier", MappingProxyType({"v": beta, "o": beta, "up": beta, "gate": beta, "down": beta})
    ),
)
