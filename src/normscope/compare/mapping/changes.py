"""Weights that a conversion changed: how B's own weight differs from A's in B's layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.compare.holdings import Held, Holdings
from normscope.compare.keys import At
from normscope.compare.pieces import Piece
from normscope.compare.types import Weights

_EQUAL = 1e-6
_HALF = 2.0**-7
INTERLEAVED = "the halves of each head interleaved"
SPLIT = "the pairs of each head split into halves"


@dataclass(frozen=True)
class Change:
    """One part of a weight of B that is not A's.

    Attributes:
        name: name of the difference, a key of `NAMES`.
        weight: parameter of B.
        source: parameter of A.
        at, role: place of the part in B, and its role.
        a, b: the two as plain data.
        message: a sentence.
    """

    name: str
    weight: str
    source: str
    at: At
    role: str
    a: object
    b: object
    message: str


def changes(
    own: Weights, a: Holdings, b: Holdings, heads: Mapping[At, int] | None = None
) -> Iterator[Change]:
    """The changes of all mapped weights, in B's order.

    A weight with the values of one of A that has no partner, or a guessed one, was not changed: it is used in
    another place. So is one whose partner was guessed, with the values of any other weight of A. The
    values of a weight that A uses and B does not are no change: its use is the difference.

    Args:
        own: A's own weights in B's layout.
        a, b: the sides with their own weights.
        heads: branch of B → width of its heads, by which a permutation is recognised.
    """
    guesses = {source for name in own.guessed for source in own.made_from[name][0]}
    drawn = [h for h in a.held if not _is_constant(h.value)]
    spare = [h.value for h in drawn if h.name in own.only_a or h.name in guesses]
    used = {h.name for h in a.held if h.nth is not None}
    inside = {name for h in b.held for name in h.made_of}
    unused = {h.name for h in b.held if h.nth is None and not h.made_of} - inside
    offsets = {h.name: p.offset for h in a.held for p in h.pieces if p.slot.kind == "gain"}
    for held in b.held:
        expected = own.values.get(held.name)
        sources = own.made_from.get(held.name, ((), ""))[0]
        if expected is None or not sources or expected.shape != held.value.shape:
            continue
        if held.name in unused and not used.isdisjoint(sources):
            continue
        others = [each.value for each in drawn] if held.name in own.guessed else spare
        if _is_close(expected, held.value) or any(_is_close(each, held.value) for each in others):
            continue
        other = _taken(held, own, b)
        if other is not None:
            yield _exchange(held, other, sources[0], own)
        elif len(held.pieces) <= 1 or held.pieces[0].elements.numel() == held.value.numel():
            piece = held.pieces[0] if held.pieces else None
            offset = offsets.get(sources[0])
            yield _change(expected, held.value, held, piece, sources[0], heads or {}, offset)
        else:
            yield from _changes_of_parts(held, expected, sources[0], heads or {})


def _exchange(held: Held, other: Held, source: str, own: Weights) -> Change:
    """A weight of B with the values that belong into another one."""
    slot, role = held.pieces[0].slot, other.pieces[0].slot.role
    theirs = own.made_from[other.name][0][0]
    message = f"B's {held.name} has the values of A's {theirs}, not those of A's {source}."
    return Change("weights-order", held.name, source, slot.at, slot.role, slot.role, role, message)


def _changes_of_parts(held: Held, expected: Tensor, source: str, heads: Mapping[At, int]) -> Iterator[Change]:
    """The changes of the parts of a fused weight."""
    parts = [(piece, expected.flatten()[piece.elements]) for piece in held.pieces]
    found = [held.value.flatten()[piece.elements] for piece, _ in parts]
    is_own = any(_is_close(values, mine) for (_, values), mine in zip(parts, found, strict=True))
    is_exchanged = all(any(_is_close(values, mine) for _, values in parts) for mine in found)
    if not is_own and not is_exchanged:
        at = held.pieces[0].slot.at
        if (moved := _moved(expected, held.value, heads.get(at, 0))) is not None:
            word, what = moved
            message = f"B's {held.name} is A's {source} with its {word} in another order: {what}."
            yield Change("weights-order", held.name, source, at, "", "as it is", what, message)
            return
    for piece, values in parts:
        mine = held.value.flatten()[piece.elements]
        if _is_close(values, mine):
            continue
        swapped = next((p for p, other in parts if p is not piece and _is_close(other, mine)), None)
        if swapped is None:
            yield _change(values, mine, held, piece, source, heads)
            continue
        role, theirs = piece.slot.role, swapped.slot.role
        message = f'The "{role}" of B\'s {held.name} has the values of A\'s "{theirs}".'
        yield Change("weights-order", held.name, source, piece.slot.at, role, role, theirs, message)


def _taken(held: Held, own: Weights, b: Holdings) -> Held | None:
    """The weight of B in the same branch whose values, which are not its own, this one has."""
    if len(held.pieces) != 1 or held.value.ndim < 2 or held.name not in own.values:
        return None
    if _is_close(own.values[held.name], held.value):
        return None
    for other in b.held:
        if len(other.pieces) == 1 and other.name != held.name and other.name in own.values:
            near = other.pieces[0].slot.at == held.pieces[0].slot.at and own.made_from[other.name][0]
            if near and _is_close(own.values[other.name], held.value):
                return other
    return None


def agreement(own: Weights, b: Holdings) -> float:
    """Share of B's mapped matrices that have A's values, up to a small change."""
    matrices = [h for h in b.held if h.value.ndim > 1 and h.name in own.values]
    alike = [h for h in matrices if _likeness(own.values[h.name], h.value) > 0.9]
    return len(alike) / len(matrices) if matrices else 0.0


def _likeness(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return 0.0
    whole = float(a.norm() * b.norm())
    return float((a * b).sum()) / whole if whole > 0 else float(torch.equal(a, b))


def _is_constant(value: Tensor) -> bool:
    return bool((value == value.flatten()[:1]).all())


def _is_close(a: Tensor, b: Tensor) -> bool:
    return _off(a, b) < _EQUAL


def _off(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return 1.0
    largest = max(float(a.abs().max()), float(b.abs().max())) if a.numel() else 0.0
    return float((a - b).abs().max()) / largest if largest else 0.0


def _change(
    a: Tensor,
    b: Tensor,
    held: Held,
    piece: Piece | None,
    source: str,
    heads: Mapping[At, int],
    offset: float | None = None,
) -> Change:
    at, role = ((-1, -1, -1), "") if piece is None else (piece.slot.at, piece.slot.role)
    part = (
        held.name
        if piece is None or piece.elements.numel() == held.value.numel()
        else f"{role} of {held.name}"
    )

    def change(name: str, left: object, right: object, words: str) -> Change:
        return Change(name, held.name, source, at, role, left, right, f"B's {part} is A's {source} {words}.")

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if _off(a, b) < _HALF and torch.equal(a.to(dtype).double(), b):
            return change(
                "weights-rounded", None, str(dtype).removeprefix("torch."), f"rounded to {_plain(dtype)}"
            )
    if not bool(b.any()):
        return Change(
            "weights", held.name, source, at, role, None, 0.0, f"B's {part} is zero, A's {source} is not."
        )
    shift = _shift(a, b)
    if shift is not None:
        between = 0.0 if piece is None or offset is None else piece.offset - offset
        if piece is not None and between and abs(shift - between) < _EQUAL:
            left, right = ("1 + w" if each else "w" for each in (offset, piece.offset))
            message = f"The norm multiplies by {left} in A and by {right} in B; both hold the same w, {part}."
            name = "final-norm-offset" if role == "final norm" else "norm-offset"
            return Change(name, held.name, source, at, role, left, right, message)
        return change("weights-shifted", 0.0, _short(shift), _added(shift))
    scale = _scale(a, b)
    if scale is not None:
        return change("weights-scaled", 1.0, _short(scale), f"times {scale:.6g}")
    if _is_turned(a, b):
        return change("weights-transposed", "as it is", "transposed", "transposed")
    if (moved := _moved(a, b, heads.get(at, 0))) is not None:
        return change(
            "weights-order", "as it is", moved[1], f"with its {moved[0]} in another order: {moved[1]}"
        )
    words = f"{100 * _off(a, b):.2g} % of the largest entry"
    return Change(
        "weights",
        held.name,
        source,
        at,
        role,
        None,
        None,
        f"B's {part} differs from A's {source} by {words}.",
    )


def relation(a: Tensor, b: Tensor) -> str | None:
    """The way in which b is made of a, in words: "plus 1", "transposed", "with its rows in another order"."""
    if (shift := _shift(a, b)) is not None:
        return _added(shift)
    if _is_turned(a, b):
        return "transposed"
    moved = _moved(a, b, 0)
    return None if moved is None else f"with its {moved[0]} in another order"


def _shift(a: Tensor, b: Tensor) -> float | None:
    """The number c with b = a + c."""
    shift = float((b - a).mean())
    return shift if _is_close(a + shift, b) else None


def _added(shift: float) -> str:
    return f"{'plus' if shift > 0 else 'minus'} {abs(shift):.6g}"


def _scale(a: Tensor, b: Tensor) -> float | None:
    """The number c with b = c · a."""
    square = float((a * a).sum())
    scale = float((a * b).sum()) / square if square else 0.0
    return scale if scale and _is_close(scale * a, b) else None


def _is_turned(a: Tensor, b: Tensor) -> bool:
    return a.ndim == 2 and a.shape[0] == a.shape[1] and _is_close(a.mT, b)


def _moved(a: Tensor, b: Tensor, width: int) -> tuple[str, str] | None:
    """Whether b has a's rows or columns in another order, and which order."""
    for axis, word in ((0, "rows"), (1, "columns")):
        if axis < a.ndim and (order := _order(a, b, axis)) is not None:
            return word, _described(order, width)
    return None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _order(a: Tensor, b: Tensor, axis: int) -> Tensor | None:
    """The order of A's rows in B; None where B's rows are not A's."""
    first, second = (each.movedim(axis, 0).reshape(each.shape[axis], -1) for each in (a, b))
    probe = torch.randn(first.shape[1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    keys_a, keys_b = first @ probe, second @ probe
    sorted_a, order_a = keys_a.sort()
    sorted_b, order_b = keys_b.sort()
    if not _is_close(sorted_a, sorted_b):
        return None
    order = torch.empty_like(order_a)
    order[order_b] = order_a
    return order if _is_close(first[order], second) else None


def _described(order: Tensor, width: int) -> str:
    """A permutation in words, where it is one that conversions make."""
    n = len(order)
    if width > 1 and n % width == 0:
        inside = torch.arange(width)
        halves = inside.reshape(2, -1).T.flatten() if width % 2 == 0 else inside
        for name, each in (
            (INTERLEAVED, halves),
            (SPLIT, halves.argsort()),
        ):
            whole = (torch.arange(0, n, width)[:, None] + each).flatten()
            if torch.equal(order, whole):
                return name
        blocks = order.reshape(-1, width)
        if torch.equal(blocks - blocks[:, :1], inside.expand_as(blocks)) and bool(
            (blocks[:, 0] % width == 0).all()
        ):
            return "the heads in another order"
        turned = torch.arange(n).reshape(-1, width).T.flatten()
        if torch.equal(order, turned) or torch.equal(order, turned.argsort()):
            return "heads and their features exchanged"
    if torch.equal(order, torch.arange(n).flip(0)):
        return "reversed"
    moved = int((order != torch.arange(n)).sum())
    return f"{moved} of {n} moved"
