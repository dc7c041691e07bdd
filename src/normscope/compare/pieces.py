"""Pieces of parameters: which of their elements have which use."""

from dataclasses import dataclass

from torch import Tensor

from normscope.compare.walk import OUTSIDE

At = tuple[int, int, int]
OUT: At = (OUTSIDE, OUTSIDE, OUTSIDE)
FIRST = ("q", "k", "v", "up", "gate", "other")
"""Roles of the first maps of a branch."""


@dataclass(frozen=True)
class Slot:
    """Use of a parameter.

    Attributes:
        at: stack, block and branch, -1 where it lies outside; a stack alone is what follows its last block.
        role: of a map "q", "k", "v", "o", "gate", "up", "down" or "map"; "norm 0", "final norm", "norm of q";
            "embedding", "positions", "head", …
        kind: "matrix", "bias", "gain", "shift", "scale", "table" or "other".
        nth: number among those that agree in the rest.
    """

    at: At
    role: str
    kind: str
    nth: int = 0


@dataclass(frozen=True)
class Piece:
    """Part of a parameter with one use.

    Attributes:
        slot: its use.
        elements: its elements in the flattened parameter, in the common form's shape.
        offset: what the model adds to it: 1 for a gain that multiplies by 1 + γ.
        words: which part it is, for a person: "rows 0–31", "transposed"; "" for the whole.
        is_twofold: whether the use is that of a weight which the model computes from this parameter alone;
            the parameter and the computed weight have a piece each.
    """

    slot: Slot
    elements: Tensor
    offset: float = 0.0
    words: str = ""
    is_twofold: bool = False
