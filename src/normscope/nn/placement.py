"""Schemes as data: where the norms sit, how a branch joins the stream, how the weights start.

A new scheme is one entry of `SCHEMES`. Models read a scheme through `placement_at`, the scale rules of its
join and the gains of its initialisation, each of which may depend on where in the stack a sublayer is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from normscope.errors import UsageError, suggest


class Slot(StrEnum):
    """A place that can hold a norm: before the branch, after it, after the add, after the last block."""

    BRANCH_IN = "branch_in"
    BRANCH_OUT = "branch_out"
    STREAM = "stream"
    FINAL = "final"


@dataclass(frozen=True)
class Where:
    """A sublayer's place: block 1 … num_blocks of its stack."""

    block: int
    num_blocks: int


Rule = Callable[[Where], float]
"""A number that may depend on the place, such as DeepNorm's α = (2L)^¼."""


def one(where: Where) -> float:
    """The rule that scales nothing."""
    return 1.0


@dataclass(frozen=True)
class Placement:
    """Which slots hold a norm."""

    slots: frozenset[Slot]

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.slots

    def with_final(self, final: bool) -> "Placement":
        """The same with or without the final norm."""
        return Placement(self.slots | {Slot.FINAL} if final else self.slots - {Slot.FINAL})


def norms_at(*slots: Slot) -> Placement:
    """A placement with norms in `slots` and nowhere else."""
    return Placement(frozenset(slots))


@dataclass(frozen=True)
class Join:
    """How a branch meets the stream: x ← stream_scale·x + branch_scale·F."""

    stream_scale: Rule = one
    branch_scale: Rule = one


Role = Literal["q", "k", "v", "o", "up", "down"]
WEIGHTS = ("xavier", "normal", "torch")


@dataclass(frozen=True)
class Initialisation:
    """How the weights start; biases start at zero.

    Attributes:
        weights: "xavier": Xavier-normal, embeddings N(0, 1/width); "normal": N(0, 0.02²) everywhere;
            "torch": what PyTorch's modules do by themselves.
        gains: factor on the weights of a role.
    """

    weights: str = "normal"
    gains: Mapping[Role, Rule] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Scheme:
    """Placement + Join + Initialisation under a name.

    Attributes:
        name: the catalogue's name.
        formula: one sublayer's update; N a norm, F the branch.
        placement: the slots, or a rule for schemes that change with depth.
        source: where it comes from.
    """

    name: str
    formula: str
    placement: Placement | Callable[[Where], Placement]
    source: str
    join: Join = Join()
    initialisation: Initialisation = Initialisation()

    def placement_at(self, where: Where) -> Placement:
        """The slots of the sublayers of one block (and, at the last block, of the stack's end)."""
        return self.placement if isinstance(self.placement, Placement) else self.placement(where)


def _deepnorm_alpha(where: Where) -> float:
    return (2 * where.num_blocks) ** 0.25


def _deepnorm_beta(where: Where) -> float:
    return (8 * where.num_blocks) ** -0.25


_XAVIER = Initialisation("xavier")

_TABLE = (
    Scheme(
        "post",
        "N(x + F(x))",
        norms_at(Slot.STREAM),
        "Vaswani et al. 2017, arXiv:1706.03762",
        initialisation=_XAVIER,
    ),
    Scheme(
        "pre",
        "x + F(N(x)), a norm at the end",
        norms_at(Slot.BRANCH_IN, Slot.FINAL),
        "Xiong et al. 2020, arXiv:2002.04745",
    ),
    Scheme(
        "pre-no-final",
        "x + F(N(x)), none at the end",
        norms_at(Slot.BRANCH_IN),
        "torch.nn.TransformerEncoder(norm_first=True) without `norm`",
    ),
    Scheme(
        "res-post",
        "x + N(F(x)), a norm at the end",
        norms_at(Slot.BRANCH_OUT, Slot.FINAL),
        "Liu et al. 2021 (Swin v2), arXiv:2111.09883; OLMo 2, arXiv:2501.00656",
    ),
    Scheme(
        "peri",
        "x + N(F(N(x))), a norm at the end",
        norms_at(Slot.BRANCH_IN, Slot.BRANCH_OUT, Slot.FINAL),
        "Ding et al. 2021 (Sandwich-LN), arXiv:2105.13290; Kim et al. 2025 (Peri-LN), arXiv:2502.02732",
    ),
    Scheme(
        "deepnorm",
        "N(αx + F(x)), α = (2L)^¼, weights of v, o and the feed-forward × β = (8L)^-¼",
        norms_at(Slot.STREAM),
        "Wang et al. 2022, arXiv:2203.00555",
        join=Join(stream_scale=_deepnorm_alpha),
        initialisation=Initialisation(
            "xavier",
            MappingProxyType(
                {"v": _deepnorm_beta, "o": _deepnorm_beta, "up": _deepnorm_beta, "down": _deepnorm_beta}
            ),
        ),
    ),
)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _TABLE})
"""Every scheme by its name."""


def scheme_named(name: str) -> Scheme:
    """The scheme called `name`; UsageError with the nearest name where there is none."""
    if name not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise UsageError(f'scheme "{name}"', f"one of {known}", suggest(name, SCHEMES, "choose one of these"))
    return SCHEMES[name]
