"""`map_weights`: A's weights as those of B.

given     a map of the user
by parts  parameters of weights that both models compute in one way
by use    each piece of B's parameter from the piece of A that has the same use at the aligned place
by name   what is left, where the names and shapes are mostly the same in both
by place  the only one of its kind and shape that is left in a branch
by rest   what is left: equal values; then guesses: the order of the uses, where both sides have as many of a
          shape, and the most similar name among those of one shape
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normscope.compare.given import MapError
from normscope.compare.holdings import Held, Holdings
from normscope.compare.mapping.divided import divided, grouped
from normscope.compare.pieces import Piece, Slot
from normscope.compare.rows import Rows
from normscope.compare.types import Weights
from normscope.errors import suggest

_MOSTLY = 0.75
BY_MAP = "by the given map"
_FIRST_ROWS = ("embedding", "head", "positions")
"""Uses whose rows may be more on one side: a padded vocabulary, a longer context."""


class CannotMapError(Exception):
    """The weights of A do not fit into B; the text is the reason."""


@dataclass
class _Found:
    """The parameters of B that have a partner, and those of A that are one.

    A computed weight that has a partner stands for the parameters that it is made of.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    made_from: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    covered: set[str] = field(default_factory=set)
    misfits: list[str] = field(default_factory=list)

    def put(self, to: Held, value: Tensor, sources: Iterable[Held], how: str) -> None:
        """Note a parameter or computed weight of B."""
        sources = list(sources)
        self.values[to.name] = value
        self.made_from[to.name] = (tuple(dict.fromkeys(each.name for each in sources)), how)
        self.covered.update([to.name, *to.made_of])
        self.used.update(name for each in sources for name in (each.name, *each.made_of))


def map_weights(
    a: Holdings, b: Holdings, rows: Rows, given: Mapping[str, str] | None = None, *, as_made: bool = False
) -> Weights:
    """A's weights in B's layout.

    Args:
        given: parameter of B → parameter of A, for those that the user maps.
        as_made: whether the values that both models compute their weights to are mapped, not the parameters
            that they compute them from; those are mapped only where both have the same.

    Raises:
        CannotMapError: they have other shapes, or too little has a partner.
        MapError: `given` names a parameter that does not exist, or whose shape does not fit.
    """
    found = _Found()
    a, b = a.seen(as_made=as_made), b.seen(as_made=as_made)
    _by_map(a, b, given or {}, found)
    if not as_made:
        _by_parts(a, b, rows, found)
    _by_use(a, b, rows, found)
    if has_same_layout(a, b):
        _copied(a, b, found)
    _by_place(a, b, rows, found)
    _by_value(a, b, found)
    _by_order(a, b, found)
    _by_name(a, b, found)
    only_a = tuple(name for name in a.named() if name not in found.used)
    only_b = tuple(name for name in b.named() if name not in found.covered)
    _require_most(a, b, found, only_b)
    return Weights(found.values, found.made_from, only_a, only_b, tuple(found.guessed), tuple(found.filled))


def has_same_layout(a: Holdings, b: Holdings) -> bool:
    """Whether A's weights load into B by name: most names are in both, and all of those with one shape."""
    names_a, names_b = a.named(), b.named()
    common = names_a.keys() & names_b.keys()
    same = all(names_a[name].value.shape == names_b[name].value.shape for name in common)
    return same and len(common) >= _MOSTLY * max(len(names_a), len(names_b), 1)


def _by_map(a: Holdings, b: Holdings, given: Mapping[str, str], found: _Found) -> None:
    names_a, names_b = a.named(), b.named()
    for to, source in given.items():
        name, origin = b.aliases.get(to, to), a.aliases.get(source, source)
        for side, names, wanted in (("B", names_b, name), ("A", names_a, origin)):
            if wanted not in names:
                raise MapError(
                    f'the map\'s "{wanted}"',
                    f"the name of a parameter of {side}",
                    suggest(wanted, sorted(names), "fix the name; the map's lines are B's name = A's name"),
                )
        value = _fitted(names_a[origin], names_b[name])
        if value is None:
            shapes = f"{tuple(names_a[origin].value.shape)} to {tuple(names_b[name].value.shape)}"
            raise MapError(
                f'the map\'s "{name}" = "{origin}" (shapes {shapes})',
                "two parameters of one shape, or one the transpose of the other",
                "remove the line, or map another parameter",
            )
        found.put(names_b[name], value, [names_a[origin]], BY_MAP)


def _fitted(source: Held, to: Held) -> Tensor | None:
    """A's parameter in the shape of B's: by the common form where both have one, else as it is."""
    if len(source.pieces) == len(to.pieces) == 1:
        value = _gathered(source, source.pieces[0])
        if value.numel() == to.pieces[0].elements.numel():
            return _scattered(to, [(to.pieces[0], value.reshape(to.pieces[0].elements.shape))])
    if source.value.shape == to.value.shape:
        return source.value.clone()
    if source.value.mT.shape == to.value.shape if source.value.ndim == 2 else False:
        return source.value.mT.clone()
    return source.value.reshape(to.value.shape).clone() if source.value.numel() == to.value.numel() else None


def _gathered(held: Held, piece: Piece) -> Tensor:
    """The piece in the common form, with what the model adds to it."""
    return held.value.flatten()[piece.elements] + piece.offset


def _scattered(held: Held, pieces: Iterable[tuple[Piece, Tensor]]) -> Tensor:
    """The parameter with these pieces; its other elements stay."""
    flat = held.value.flatten().clone()
    for piece, value in pieces:
        flat[piece.elements.flatten()] = (value - piece.offset).flatten()
    return flat.reshape(held.value.shape)


def _copied(a: Holdings, b: Holdings, found: _Found) -> None:
    names = a.named()
    for name, to in b.named().items():
        if name in names and name not in found.covered:
            found.put(to, names[name].value.clone(), [names[name]], "by its name")


def _by_parts(a: Holdings, b: Holdings, rows: Rows, found: _Found) -> None:
    """The parameters of computed weights that both models compute from the same ones."""
    slots = {piece.slot: held for held in a.held if held.made_of for piece in held.pieces}
    named_a, named_b = a.named(), b.named()
    for to in b.held:
        partners = [slots.get(slot) for p in to.pieces if (slot := _slot_in_a(p.slot, rows)) is not None]
        source = partners[0] if to.made_of and partners else None
        if source is None or sorted(source.made_of.values()) != sorted(to.made_of.values()):
            continue
        ordered = [sorted(each.made_of, key=each.made_of.__getitem__) for each in (source, to)]
        for name_a, name_b in zip(*ordered, strict=True):
            found.put(named_b[name_b], named_a[name_a].value.clone(), [named_a[name_a]], "as a part of it")
        found.covered.add(to.name)


def _factor(source: Held, part: Piece, to: Held, piece: Piece, is_given: bool) -> float:
    """Number to add to a gain so that B holds the same number as A, and not the same factor.

    Where fresh gains begin as different factors (w = 1 in both, and one multiplies by 1 + w), the number
    that is added is the difference, not the way in which a gain is held.
    """
    shift = piece.offset - part.offset
    if not shift or is_given or piece.slot.kind != "gain":
        return 0.0
    begin_a = float(source.value.flatten()[part.elements].mean()) + part.offset
    begin_b = float(to.value.flatten()[piece.elements].mean()) + piece.offset
    return 0.0 if abs(begin_a - begin_b) < 0.25 else shift


def _by_use(a: Holdings, b: Holdings, rows: Rows, found: _Found) -> None:
    slots = {piece.slot: (held, piece) for held in a.held for piece in held.pieces}
    of_a, of_b = grouped(a), grouped(b)
    for to in b.held:
        if to.name in found.covered or not to.pieces:
            continue
        made: list[tuple[Piece, Tensor]] = []
        sources: list[Held] = []
        words: list[str] = []
        for piece in to.pieces:
            slot = _slot_in_a(piece.slot, rows)
            partner = None if slot is None else slots.get(slot)
            if slot is not None and (parts := divided(slot, piece, of_a, of_b)) is not None:
                made.append((piece, parts[0]))
                sources += parts[1]
                words.append(f"joined or split: {' and '.join(each.name for each in parts[1])}")
            elif slot is not None and partner is not None:
                held, other = partner
                is_given = a.is_given is True and b.is_given is True
                value = _sized(_gathered(held, other) + _factor(held, other, to, piece, is_given), to, piece)
                if value is None:
                    if piece.slot.kind == "matrix":
                        found.misfits.append(_misfit(held, other, to, piece))
                    continue
                made.append((piece, value))
                sources.append(held)
                words.append(_words(held, other, piece))
            elif slot is not None and (plain := _plain(piece, slot, slots, a)) is not None:
                made.append((piece, plain))
                words.append(f"{float(plain.flatten()[0]):g}: A has none")
                found.filled.append(to.name)
        covered = sum(piece.elements.numel() for piece, _ in made)
        tied = len(to.pieces) > 1 and len(made) < len(to.pieces) and covered >= to.value.numel()
        if made and (len(made) == len(to.pieces) or tied):
            how = "; ".join(dict.fromkeys(word for word in words if word))
            found.put(to, _scattered(to, reversed(made)), sources, how or "by its use")


def _slot_in_a(slot: Slot, rows: Rows) -> Slot | None:
    at = rows.to_a.get(slot.at)
    return None if at is None else Slot(at, slot.role, slot.kind, slot.nth)


def _sized(value: Tensor, to: Held, piece: Piece) -> Tensor | None:
    """A's piece in the shape of B's; None where it does not fit."""
    shape = piece.elements.shape
    if value.shape == shape:
        return value
    if value.ndim == len(shape) > 1 and value.shape[1:] == shape[1:] and piece.slot.role in _FIRST_ROWS:
        own = to.value.flatten()[piece.elements].clone()
        rows = min(len(own), len(value))
        own[:rows] = value[:rows]
        return own
    if value.numel() == piece.elements.numel() and piece.slot.kind != "matrix":
        return value.reshape(shape)
    return None


def _plain(piece: Piece, slot: Slot, slots: Mapping[Slot, object], a: Holdings) -> Tensor | None:
    """Zero for a bias that A lacks at a map or norm that it has, one for a gain that a norm of A lacks."""
    shape = piece.elements.shape
    has_norm = (*slot.at, slot.role) in a.places
    if piece.slot.kind == "gain" and has_norm:
        return torch.ones(shape, dtype=torch.float64)
    if piece.slot.kind == "shift" and has_norm:
        return torch.zeros(shape, dtype=torch.float64)
    if piece.slot.kind == "bias" and Slot(slot.at, slot.role, "matrix", slot.nth) in slots:
        return torch.zeros(shape, dtype=torch.float64)
    return None


def _words(held: Held, source: Piece, to: Piece) -> str:
    """Words for the way in which a piece was made."""
    words = [part for part in (source.words.split(", ") if source.words else []) if part != "transposed"]
    if ("transposed" in source.words) != ("transposed" in to.words):
        words.append("transposed")
    if source.offset != to.offset:
        shift = source.offset - to.offset
        words.append(f"{'minus' if shift < 0 else 'plus'} {abs(shift):g}")
    text = ", ".join(words)
    return f"{text} of {held.name}" if text and len(words) and words[0] != "transposed" else text


def _misfit(held: Held, source: Piece, to: Held, piece: Piece) -> str:
    a, b = (" × ".join(str(n) for n in each.elements.shape) for each in (source, piece))
    return f"{held.name} is {a} in A, {to.name} is {b} in B (features out × in)"


def _left(a: Holdings, b: Holdings, found: _Found) -> Iterator[tuple[Held, list[Held]]]:
    """The parameters of B without a partner, each with those of A that are left and have its shape."""
    for to in b.named().values():
        if to.name not in found.covered:
            free = [each for each in a.named().values() if each.name not in found.used]
            yield to, [each for each in free if each.value.shape == to.value.shape]


def _by_place(a: Holdings, b: Holdings, rows: Rows, found: _Found) -> None:
    """The only map or bias of one shape that is left at its place, where a role is not known on one side."""

    def left(holdings: Holdings, done: set[str]) -> list[tuple[Held, Piece]]:
        free = [each for each in holdings.held if each.name not in done and len(each.pieces) == 1]
        return [(held, held.pieces[0]) for held in free if held.pieces[0].slot.kind in ("matrix", "bias")]

    places: dict[tuple[Any, ...], list[list[tuple[Held, Piece]]]] = {}
    for side, pairs in enumerate((left(a, found.used), left(b, found.covered))):
        for held, piece in pairs:
            at = rows.to_a.get(piece.slot.at) if side else piece.slot.at
            if at is not None and min(at) >= 0:
                key = (at, piece.slot.kind, tuple(piece.elements.shape))
                places.setdefault(key, [[], []])[side].append((held, piece))
    for ours, theirs in places.values():
        if len(ours) == len(theirs) == 1:
            (source, part), (to, piece) = ours[0], theirs[0]
            found.put(to, _scattered(to, [(piece, _gathered(source, part))]), [source], "by its place")


def _by_value(a: Holdings, b: Holdings, found: _Found) -> None:
    """Equal values, of weights that are no constants."""
    for to, free in _left(a, b, found):
        if to.value.numel() < 2 or bool((to.value == to.value.flatten()[0]).all()):
            continue
        same = [each for each in free if torch.equal(each.value, to.value)]
        if len(same) == 1:
            found.put(to, same[0].value.clone(), same, "by its values")


def _common_shape(held: Held) -> tuple[int, ...]:
    """The shape of the common form where a weight has one, else its own; without axes of one."""
    shape = held.pieces[0].elements.shape if len(held.pieces) == 1 else held.value.shape
    return tuple(n for n in shape if n > 1)


def _by_order(a: Holdings, b: Holdings, found: _Found) -> None:
    """Pairs of the weights of which both sides have as many, in the order in which a forward uses them."""
    groups: dict[tuple[int, ...], tuple[list[Held], list[Held]]] = {}
    for side, (holdings, done) in enumerate(((a, found.used), (b, found.covered))):
        left = [each for each in holdings.named().values() if each.name not in done and each.nth is not None]
        for held in sorted(left, key=lambda each: each.nth or 0):
            groups.setdefault(tuple(sorted(_common_shape(held))), ([], []))[side].append(held)
    for ours, theirs in groups.values():
        if len(ours) == len(theirs):
            for source, to in zip(ours, theirs, strict=True):
                is_turned = _common_shape(source) != _common_shape(to)  # a table that is read by one-hot rows
                value = source.value.clone() if is_turned else _fitted(source, to)
                if value is None or value.shape != to.value.shape:
                    continue
                found.put(to, value, [source], "guessed by its shape and the order of use")
                found.guessed.append(to.name)


def _by_name(a: Holdings, b: Holdings, found: _Found) -> None:
    """The most similar name of one shape, among those whose use is not known on one side."""
    for to, free in _left(a, b, found):
        likely = [each for each in free if _may_be(each, to)]
        ranked = sorted(likely, key=lambda each: -_likeness(each.name, to.name))
        if not ranked or _likeness(ranked[0].name, to.name) < 0.4:
            continue
        found.put(to, ranked[0].value.clone(), ranked[:1], "guessed by its name and shape")
        found.guessed.append(to.name)


def _may_be(source: Held, to: Held) -> bool:
    """Whether two uses do not contradict one another: known uses at different places or roles do."""
    if not source.pieces or not to.pieces:
        return True
    kinds = {piece.slot.kind for piece in source.pieces}, {piece.slot.kind for piece in to.pieces}
    outside = all(min(piece.slot.at) < 0 for piece in (*source.pieces, *to.pieces))
    return kinds[0] == kinds[1] and (outside or source.pieces[0].slot.role == to.pieces[0].slot.role)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _require_most(a: Holdings, b: Holdings, found: _Found, only_b: tuple[str, ...]) -> None:
    if found.misfits:
        first, others = found.misfits[0], len(found.misfits) - 1
        more = f", and {others} more" if others else ""
        raise CannotMapError(f"the weights cannot be mapped: {first}{more}")
    names = b.named()
    total = sum(each.value.numel() for each in names.values())
    missing = sum(names[name].value.numel() for name in only_b)
    if missing > total / 2 or not found.values:
        shown = ", ".join(only_b[:3]) + (", …" if len(only_b) > 3 else "")
        raise CannotMapError(
            f"the weights cannot be mapped: {len(only_b)} of B's {len(names)} parameters have no partner "
            f"in A ({shown}); map them with --map FILE"
        )
