"""Pieces of parameters: which of their elements have which use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import CONVOLUTIONS, matmul_operands
from normscope.compare.keys import OUTSIDE, At

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


def whole(leaf: Value, where: Tensor) -> Tensor:
    """The elements in the parameter's own shape without axes of one, where all of them are used."""
    shape = [n for n in leaf.shape if n > 1] or [1]
    if len(where.unique()) == leaf.numel:
        return torch.arange(leaf.numel).reshape(shape)
    return where.reshape([n for n in where.shape if n > 1] or [1])


def rows_first(where: Tensor, op: Op) -> Tensor:
    """(features out, features in) of the elements of a weight as a matmul or convolution reads it."""
    operands = matmul_operands(op)
    if op.base in CONVOLUTIONS or op.base == "linear" or operands is None:
        return where.reshape(where.shape[0], -1) if where.ndim > 1 else where.reshape(-1, 1)
    second = operands[1].is_weight
    if where.ndim > 2:  # one matrix a head, or one matrix expanded to the batch
        flat = where.reshape(-1, *where.shape[-2:])
        flat = flat[:1] if bool((flat == flat[:1]).all()) else flat
        turned = flat.transpose(-1, -2) if second else flat
        return turned.reshape(-1, turned.shape[-1])
    if where.ndim < 2:
        return where.reshape(-1, 1)
    return where.mT if second else where


def stored(matrix: Tensor) -> Tensor | None:
    """The columns of a matrix in the order in which the parameter has them, None where they are in it.

    An einsum over two axes at once, such as heads and their features, reads them in an order of its own.
    """
    if matrix.ndim != 2 or not bool((matrix >= 0).all()):
        return None
    order = matrix[0].argsort()
    is_one = bool((matrix[:, order].diff(dim=1) > 0).all())
    return order if is_one and not torch.equal(order, torch.arange(len(order))) else None


def span(rows: Tensor, leaf: Value) -> str:
    """Words for the part of a parameter."""
    firsts = rows.reshape(rows.shape[0], -1)[:, 0]
    others = leaf.numel // leaf.shape[0] if leaf.shape else 1
    lines, name = (firsts // others, "rows") if int(firsts.max()) >= leaf.shape[-1] else (firsts, "columns")
    first, last = int(lines.min()), int(lines.max())
    gaps = "" if last - first + 1 == len(lines.unique()) else f" of {name} {first}–{last}"
    return f"{len(lines.unique())}{gaps}" if gaps else f"{name} {first}–{last}"
