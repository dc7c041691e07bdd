"""Holdings of a model: what each parameter is, by its place in the anatomy and its use there.

A `Piece` is a part of a parameter with one use: q in a fused weight, or the whole. Its `elements` give the
common form, (features out, features in) for a matrix, whatever way the model holds it: transposed, packed,
sliced, by heads. Weights that the model computes from parameters (see made.py) are held like parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from normscope.anatomy import Anatomy, Norm, named_parameters
from normscope.compare.keys import Key
from normscope.compare.made import Part, buffers_read
from normscope.compare.pieces import FIRST, Piece
from normscope.compare.step_places import Place
from normscope.compare.uses import Uses
from normscope.compare.walk import Twin

Slotted = Literal["in", "out", "stream"]


@dataclass(frozen=True)
class Held:
    """A parameter, a buffer that acts as one, or a computed weight, with its value in float64.

    Attributes:
        name: its name.
        value: its value.
        pieces: its parts.
        made_of: of a computed weight: parameter → what it is there; empty for a parameter.
        nth: its number in the order of the first uses in a forward; None where it is not used.
    """

    name: str
    value: Tensor
    pieces: tuple[Piece, ...] = ()
    made_of: Mapping[str, Part] = field(default_factory=dict)
    nth: int | None = None


@dataclass(frozen=True)
class Holdings:
    """Holdings of a side for the function part, as plain data and tensors.

    Attributes:
        held: the parameters in order; a tied one once.
        aliases: further names of tied parameters → the name in `held`.
        anatomy: the reading of the float64 copy, to which all sites belong.
        places: key of a step → where its tensor is in the model.
        rows: key of a step that is a part of a fused projection → its features there.
        norms: key of a norm's output → which slot of its branch it is in.
        is_given: whether the weights are given, not drawn: the same at two seeds; None where that is unknown.
        embedding_norm: the norm before the first block.
    """

    held: tuple[Held, ...]
    aliases: Mapping[str, str]
    anatomy: Anatomy
    places: Mapping[Key, Place]
    rows: Mapping[Key, Tensor]
    norms: Mapping[Key, Slotted]
    is_given: bool | None = None
    embedding_norm: Norm | None = None

    def named(self) -> dict[str, Held]:
        """The parameters by name, without computed weights."""
        return {each.name: each for each in self.held if not each.made_of}

    def parameters(self) -> dict[str, Tensor]:
        """The values of the parameters, without computed weights."""
        return {name: held.value for name, held in self.named().items()}

    def seen(self, *, as_made: bool) -> "Holdings":
        """The holdings with one piece for each use.

        Args:
            as_made: where a weight is computed from one parameter of its shape, whether the piece is that of
                the computed weight, or that of the parameter.
        """
        held = []
        for each in self.held:
            is_needed = as_made or any(not piece.is_twofold for piece in each.pieces)
            if not each.made_of:
                kept = tuple(piece for piece in each.pieces if not (as_made and piece.is_twofold))
                held.append(replace(each, pieces=kept))
            elif is_needed:
                held.append(each)
        return replace(self, held=tuple(held))


def holdings_of(twin: Twin, is_given: bool | None = None) -> Holdings:
    """The holdings of a model; one forward where a weight is fused."""
    parameters = dict(named_parameters(twin.model))
    names = {id(p): name for name, p in parameters.items()}
    everything = named_parameters(twin.model, remove_duplicate=False)
    aliases = {name: names[id(p)] for name, p in everything if names[id(p)] != name}
    uses = Uses(twin)
    pieces = uses.pieces()
    inside = (name for each in uses.made for name in each.parts)
    buffers = sorted({*inside, *buffers_read(twin.graph)} - parameters.keys())
    held = [
        Held(name, twin.own(name), tuple(pieces.get(name, ())), nth=uses.order.get(name))
        for name in (*parameters, *buffers)
    ]
    held += [
        Held(each.name, uses.computed[each.name], tuple(pieces.get(each.name, ())), each.parts)
        for each in uses.made
    ]
    twin.rows = uses.rows()
    twin.made = {each.name: tuple(value.site for value in each.values) for each in uses.made}
    twin.steady = frozenset(name for each in uses.made for name, (kind, _) in each.parts.items() if kind)
    places = {place.key: place for place in twin.places}
    rows: dict[Key, Tensor] = {}
    for key, roles in twin.rows.items():
        fused = places.pop(key)
        for role, taken in roles.items():
            split = (*key[:3], role)
            places[split] = replace(fused, key=split)
            rows[split] = taken
    slots = _slotted(twin.anatomy, places)
    return Holdings(tuple(held), aliases, twin.anatomy, places, rows, slots, is_given, twin.embedding_norm)


def _slotted(anatomy: Anatomy, places: Mapping[Key, Place]) -> dict[Key, Slotted]:
    """Slot of each norm of each branch: before its first map, after its last one, or after the sum."""
    found: dict[Key, Slotted] = {}
    for key, place in places.items():
        *at, name = key
        if not name.startswith("norm ") or name.endswith(" in") or min(at) < 0:
            continue
        total = places.get((*at, "sum"))  # type: ignore[arg-type]
        firsts = [p.index for k, p in places.items() if k[:3] == key[:3] and k[3] in FIRST]
        if total is not None and place.index > total.index:
            found[key] = "stream"
        else:
            found[key] = "in" if not firsts or place.index < min(firsts) else "out"
    return found
