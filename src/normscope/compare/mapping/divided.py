"""Projections that one side holds as one matrix, and the other one as several: by heads, or by experts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from normscope.compare.holdings import Held, Holdings
from normscope.compare.keys import At
from normscope.compare.pieces import Piece, Slot

Group = tuple[At, str, str]
Pieces = Mapping[Group, list[tuple[Held, Piece]]]


def group_of(slot: Slot) -> Group:
    """The uses that differ in their number alone."""
    return slot.at, slot.role, slot.kind


def grouped(holdings: Holdings) -> Pieces:
    """The pieces of all matrices and biases by their use, in the order of their numbers."""
    found: dict[Group, list[tuple[Held, Piece]]] = {}
    for held in holdings.held:
        for piece in held.pieces:
            if piece.slot.kind in ("matrix", "bias"):
                found.setdefault(group_of(piece.slot), []).append((held, piece))
    for pieces in found.values():
        pieces.sort(key=lambda each: each[1].slot.nth)
    return found


def divided(slot: Slot, piece: Piece, of_a: Pieces, of_b: Pieces) -> tuple[Tensor, list[Held]] | None:
    """The rows of A's pieces that are a piece of B, and the weights that hold them.

    None where both sides have as many pieces of the use, or other rows in all.

    Args:
        slot: the use in A.
        piece: B's piece.
        of_a, of_b: see `grouped`.
    """
    ours, theirs = of_a.get(group_of(slot), []), of_b.get(group_of(piece.slot), [])
    sizes = [[len(each.elements) for _, each in side] for side in (ours, theirs)]
    widths = {tuple(each.elements.shape[1:]) for _, each in (*ours, *theirs)}
    if len(ours) == len(theirs) or sum(sizes[0]) != sum(sizes[1]) or len(widths) != 1:
        return None
    nth = next(n for n, (_, each) in enumerate(theirs) if each is piece)
    start = sum(sizes[1][:nth])
    rows = torch.cat([held.value.flatten()[each.elements] + each.offset for held, each in ours])
    ends = torch.tensor(sizes[0]).cumsum(0).tolist()
    holders = [
        held
        for (held, _), size, end in zip(ours, sizes[0], ends, strict=True)
        if end > start and end - size < start + sizes[1][nth]
    ]
    return rows[start : start + sizes[1][nth]], list({id(held): held for held in holders}.values())
