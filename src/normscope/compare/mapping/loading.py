"""Weights that load from A into B by name and shape, but that B uses in another way.

Fresh weights are mapped by their use, so the functions of two such models are the same; a checkpoint of one
does not fit the other all the same.
"""

import torch
from torch import Tensor

from normscope.compare.holdings import Held, Holdings
from normscope.compare.mapping.changes import relation
from normscope.compare.mapping.weights import BY_MAP, has_same_layout
from normscope.compare.pieces import Piece
from normscope.compare.types import Weights

_RESULT = ": a checkpoint of A that is loaded by names would compute something else in B."


def loading_notes(weights: Weights, a: Holdings, b: Holdings) -> list[str]:
    """Sentences on these weights, one for each way; those of several layers together.

    Args:
        weights: A's weights in B's layout.
        a, b: the sides, A with the values that were mapped.
    """
    if not has_same_layout(a, b):
        return []
    named_a, named_b = a.named(), b.named()
    ways: dict[str, list[str]] = {}
    for name, value in weights.values.items():
        if name not in named_a or name not in named_b or weights.made_from[name][1] == BY_MAP:
            continue
        if not torch.equal(value, named_a[name].value):
            way = _way(named_a[name], named_b[name], value, weights.made_from[name][0])
            ways.setdefault(way, []).append(name)
    return [f"{way.replace('#', _listed(names))}{_RESULT}" for way, names in ways.items()]


def _listed(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if names[1:] else "")


def _way(a: Held, b: Held, value: Tensor, sources: tuple[str, ...]) -> str:
    """Sentence on how B uses a weight, "#", otherwise than A; `value` is A's one in B's layout."""
    if sources != (b.name,):
        return f"B uses # as A uses {_common(b.name, ' and '.join(sources)) or 'none'}"
    roles_a, roles_b = (_order(each.pieces) for each in (a, b))
    if roles_a != roles_b:
        return f"B reads # as {roles_b} where A reads {roles_a}"
    return f"B needs A's # {relation(a.value, value) or 'in another layout'}"


def _common(name: str, other: str) -> str:
    """`other` without the module path that it shares with `name`: the same for all layers."""
    path, parts = name.split("."), other.split(".")
    shared = next((n for n, each in enumerate(parts) if path[n : n + 1] != [each]), len(parts))
    return ".".join(parts[shared:])


def _order(pieces: tuple[Piece, ...]) -> str:
    """The roles of a fused weight in the order in which they stand there: "q, k, v"."""
    firsts = {piece.slot.role: piece.elements.reshape(len(piece.elements), -1)[:, 0] for piece in pieces}
    roles = ", ".join(sorted(firsts, key=lambda role: int(firsts[role].min())))
    gaps = [rows.sort().values.diff().unique() for rows in firsts.values()]
    return f"{roles} of each head" if any(len(each) > 1 for each in gaps) and len(firsts) > 1 else roles
