"""Holdings of a model: what each parameter is, by its place in the anatomy and its use there.

A `Piece` is a part of a parameter with one use: q in a fused weight, or the whole. Its `elements` give the
common form, (features out, features in) for a matrix, whatever way the model holds it: transposed, packed,
sliced, by heads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from normscope.anatomy import Anatomy, Branch, Norm, Site, named_parameters
from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import CONVOLUTIONS, MATMULS, SAME, VIEWS, matmul_operands, weight_of
from normscope.compare.indices import elements, features
from normscope.compare.walk import OUTSIDE, Key, Place, Twin

At = tuple[int, int, int]
Slotted = Literal["in", "out", "stream"]
_FIRST = ("q", "k", "v", "up", "gate", "other")
_OUT: At = (OUTSIDE, OUTSIDE, OUTSIDE)


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
    """

    slot: Slot
    elements: Tensor
    offset: float = 0.0
    words: str = ""


@dataclass(frozen=True)
class Held:
    """A parameter with its value in float64."""

    name: str
    value: Tensor
    pieces: tuple[Piece, ...] = ()


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
        """The parameters by name."""
        return {each.name: each for each in self.held}


def holdings_of(twin: Twin, is_given: bool | None = None) -> Holdings:
    """The holdings of a model; one forward where a weight is fused."""
    parameters = dict(named_parameters(twin.model))
    names = {id(p): name for name, p in parameters.items()}
    everything = named_parameters(twin.model, remove_duplicate=False)
    aliases = {name: names[id(p)] for name, p in everything if names[id(p)] != name}
    uses = _Uses(twin)
    pieces = uses.pieces()
    held = tuple(Held(name, twin.own(name), tuple(pieces.get(name, ()))) for name in parameters)
    twin.rows = uses.rows()
    places = {place.key: place for place in twin.places}
    rows: dict[Key, Tensor] = {}
    for key, roles in twin.rows.items():
        fused = places.pop(key)
        for role, taken in roles.items():
            split = (*key[:3], role)
            places[split] = replace(fused, key=split)
            rows[split] = taken
    slots = _slotted(twin.anatomy, places)
    return Holdings(held, aliases, twin.anatomy, places, rows, slots, is_given, twin.embedding_norm)


def _slotted(anatomy: Anatomy, places: Mapping[Key, Place]) -> dict[Key, Slotted]:
    """Slot of each norm of each branch: before its first map, after its last one, or after the sum."""
    found: dict[Key, Slotted] = {}
    for key, place in places.items():
        *at, name = key
        if not name.startswith("norm ") or name.endswith(" in") or min(at) < 0:
            continue
        total = places.get((*at, "sum"))  # type: ignore[arg-type]
        firsts = [p.index for k, p in places.items() if k[:3] == key[:3] and k[3] in _FIRST]
        if total is not None and place.index > total.index:
            found[key] = "stream"
        else:
            found[key] = "in" if not firsts or place.index < min(firsts) else "out"
    return found


class _Uses:
    """Finds the uses of all parameters in the graph of one forward."""

    def __init__(self, twin: Twin) -> None:
        self.twin, self.anatomy, self.graph = twin, twin.anatomy, twin.graph
        self.masks = twin.read_masks()
        self.index = {
            op.site(i): value.index
            for op in self.graph.ops
            if not op.virtual
            for i, value in enumerate(op.outputs)
        }
        self.ends: list[tuple[int, At]] = []  # index of the last value of each branch, in order
        self.starts: list[tuple[int, int]] = []  # first value of each stack, and its last
        self.roles: dict[str, tuple[At, tuple[str, ...]]] = {}
        self.norms: dict[Site, tuple[At, str]] = {}
        self._read_anatomy()
        self.inside = dict(self._norm_ops())
        self.seen: dict[Slot, int] = {}
        self.halves: dict[str, dict[str, Tensor]] = {}

    def _read_anatomy(self) -> None:
        for s, stack in enumerate(self.anatomy.stacks):
            for b, block in enumerate(stack.blocks):
                for n, branch in enumerate(block.branches):
                    at = (s, b, n)
                    self.ends.append((self._index(branch.sum), at))
                    for projection in branch.projections:
                        self.roles.setdefault(projection.parameter, (at, projection.roles))
                    for i, norm in enumerate(branch.norms):
                        self.norms.setdefault(norm.output, (at, f"norm {i}"))
            if stack.final_norm is not None:
                self.norms.setdefault(stack.final_norm.output, ((s, OUTSIDE, OUTSIDE), "final norm"))
            first = self._index(stack.blocks[0].entry) if stack.blocks else -1
            self.starts.append((first, self._index(stack.blocks[-1].exit) if stack.blocks else -1))
        self.ends.sort()

    def _index(self, site: Site) -> int:
        if site in self.index:
            return self.index[site]
        value = self.twin.value(site)
        return -1 if value is None else value.index

    def _norm_ops(self) -> Iterator[tuple[Op, FoundNorm]]:
        """The ops of each norm, from its core to its last."""
        for value in self.graph.values:
            norm = value.norm
            while norm is not None and value.op is not None:
                yield value.op, norm
                if value.op is norm.core:
                    break
                value = next((v for v in value.inputs if v.live), value.inputs[0])

    def at(self, value: Value) -> At:
        """The branch in whose computation a value lies."""
        for s, (first, last) in enumerate(self.starts):
            if value.index <= first and (s == 0 or value.index > self.starts[s - 1][1]):
                return _OUT if s == 0 else (s, OUTSIDE, 0)
            if first < value.index <= last:
                return next((at for end, at in self.ends if value.index <= end), (s, OUTSIDE, OUTSIDE))
        return (len(self.starts) - 1, OUTSIDE, OUTSIDE) if self.starts else _OUT

    def pieces(self) -> dict[str, list[Piece]]:
        """The pieces of each parameter, in the order of their uses."""
        found: dict[str, list[tuple[int, Piece]]] = {}
        leaves = [v for v in self.graph.values if v.origin == "parameter" and v.name is not None]
        uses = []
        for leaf in leaves:
            numbers = elements(leaf)
            for value in search([leaf], lambda v: (each for each in v.successors if each.is_weight)):
                where = numbers.get(value)
                uses += [(op.outputs[0].index, leaf, value, where, op) for op in value.users if _consumes(op)]
        uses.sort(key=lambda use: use[0])
        done: set[tuple[str, Op]] = set()
        for order, leaf, value, where, op in uses:
            assert leaf.name is not None
            if (leaf.name, op) in done:
                continue
            done.add((leaf.name, op))
            known = {piece.slot.role for _, piece in found.get(leaf.name, [])}
            for piece in self._use(leaf, value, where, op):
                if piece.slot.role in known and self._is_repeated(leaf.name, piece, found):
                    continue
                found.setdefault(leaf.name, []).append((order, self._numbered(piece)))
        return {name: [piece for _, piece in pieces] for name, pieces in found.items()}

    def _is_repeated(self, name: str, piece: Piece, found: Mapping[str, list[tuple[int, Piece]]]) -> bool:
        """Whether a parameter's part has the same use already: a second call of a shared module."""
        return any(
            other.slot.role == piece.slot.role
            and other.slot.kind == piece.slot.kind
            and other.elements.shape == piece.elements.shape
            and torch.equal(other.elements, piece.elements)
            for _, other in found.get(name, [])
        )

    def _numbered(self, piece: Piece) -> Piece:
        slot = piece.slot
        nth = self.seen[slot] = self.seen.get(slot, -1) + 1
        return Piece(Slot(slot.at, slot.role, slot.kind, nth), piece.elements, piece.offset, piece.words)

    def rows(self) -> dict[Key, dict[str, Tensor]]:
        """Features of each role in the step of each fused projection."""
        found: dict[Key, dict[str, Tensor]] = {}
        for name, (at, roles) in self.roles.items():
            if len(roles) < 2:
                continue
            if masks := self.masks.get(name):
                rows = {role: mask.cpu().nonzero().squeeze(1) for role, mask in masks.items()}
            else:
                rows = self.halves.get(name, {})
            if set(rows) == set(roles):
                found[(*at, " and ".join(roles))] = rows
        return found

    def _use(self, leaf: Value, value: Value, where: Tensor | None, op: Op) -> Iterator[Piece]:
        norm = self.inside.get(op)
        if where is None:  # looked up with indices that are not recorded, or computed
            if op.base in ("add", "sub", "cat") and min(leaf.shape, default=0) > 0:
                yield self._added(leaf, torch.arange(leaf.numel).reshape(leaf.shape), op)
            elif weight_of(op) is value and leaf.name in self.roles:
                at, roles = self.roles[leaf.name]
                yield Piece(Slot(at, "+".join(roles), "other"), torch.arange(leaf.numel).reshape(leaf.shape))
        elif norm is not None:
            yield from self._norm_piece(leaf, where, op, norm)
        elif weight_of(op) is value:
            yield from self._matrix(leaf, where, op)
        elif op.base in MATMULS | CONVOLUTIONS:
            yield from self._bias(where, op, op)
        elif op.base in ("embedding", "index", "index_select", "gather") and op.outputs[0].live:
            yield Piece(Slot(self._outer(op), "embedding", "table"), where)
        elif op.base in ("add", "sub") and (source := _matmul_behind(op, value)) is not None:
            yield from self._bias(where.reshape(-1) if where.ndim > 1 else where, op, source)
        elif op.base in ("add", "sub"):
            yield self._added(leaf, where, op)
        elif op.base in ("mul", "div"):
            yield Piece(Slot(self.at(op.outputs[0]), "scale", "scale"), _whole(leaf, where))
        else:
            yield Piece(Slot(self.at(op.outputs[0]), op.base, "other"), _whole(leaf, where))

    def _outer(self, op: Op) -> At:
        return self.at(op.outputs[0])

    def _norm_piece(self, leaf: Value, where: Tensor, op: Op, norm: FoundNorm) -> Iterator[Piece]:
        at, role = self._norm_role(norm)
        flat = where.squeeze() if where.numel() > 1 else where.reshape(1)
        if norm.weight is leaf or (norm.weight is not None and norm.weight.name == leaf.name):
            yield Piece(Slot(at, role, "gain"), flat, norm.weight_offset)
        elif leaf.numel > 1 or norm.kind in ("dyt", "derf"):
            kind = "shift" if leaf.numel > 1 else "other"
            yield Piece(Slot(at, role, kind), flat)
        else:
            yield Piece(Slot(at, role, "other"), flat)

    def _norm_role(self, norm: FoundNorm) -> tuple[At, str]:
        site = norm.output.site
        if site in self.norms:
            return self.norms[site]
        at = self.at(norm.output)
        branch = self._branch(at)
        if branch is not None:
            operands = {
                self._index(getattr(attention, name)): role
                for attention in branch.attention
                for role, name in (("q", "query"), ("k", "key"), ("v", "value"))
            }
            met = search(
                [norm.output],
                lambda v: () if weight_of(v.op) is not None and v is not norm.output else v.successors,
            )
            last = max(operands, default=-1)
            for value in met:
                if value.index > last:
                    continue
                if value.index in operands:
                    return at, f"norm of {operands[value.index]}"
        return at, "norm"

    def _branch(self, at: At) -> Branch | None:
        s, b, n = at
        return None if min(at) < 0 else self.anatomy.stacks[s].blocks[b].branches[n]

    def _matrix(self, leaf: Value, where: Tensor, op: Op) -> Iterator[Piece]:
        assert leaf.name is not None
        canonical = _rows_first(where, op)
        at, parts = self._parts(leaf.name, canonical, op)
        whole = len(parts) == 1
        turned = canonical.ndim == 2 and bool(canonical[0, -1] - canonical[0, 0] >= canonical.shape[1] > 1)
        for role, rows in parts.items():
            words = [] if whole else [_span(canonical[rows], leaf)]
            if turned:
                words.append("transposed")
            yield Piece(Slot(at, role, "matrix"), canonical[rows], words=", ".join(words))

    def _parts(self, name: str, canonical: Tensor, op: Op) -> tuple[At, dict[str, Tensor]]:
        """The rows of a matmul's output by role."""
        num = canonical.shape[0]
        everything = torch.arange(num)
        if name not in self.roles:
            return self.at(op.outputs[0]), {self._outside_role(op): everything}
        at, roles = self.roles[name]
        if len(roles) == 1:
            return at, {roles[0]: everything}
        if masks := self.masks.get(name):
            leaf_rows = self._features(name, canonical)
            found = {role: (mask.cpu()[leaf_rows]).nonzero().squeeze(1) for role, mask in masks.items()}
            return at, {role: rows for role, rows in found.items() if len(rows)}
        if set(roles) == {"gate", "up"} and (halves := _gate_and_up(op)) is not None:
            self.halves[name] = halves
            return at, halves
        return at, {"+".join(roles): everything}

    def _features(self, name: str, canonical: Tensor) -> Tensor:
        """Feature of the parameter of each row of a matmul's output."""
        branch = self._branch(self.roles[name][0])
        assert branch is not None
        projection = next(p for p in branch.projections if p.parameter == name)
        shape = dict(named_parameters(self.twin.model))[name].shape
        stride = 1
        for size in shape[projection.feature_axis + 1 :]:
            stride *= size
        first = canonical.reshape(canonical.shape[0], -1)[:, 0]
        return first // stride % shape[projection.feature_axis]

    def _outside_role(self, op: Op) -> str:
        if op.base in CONVOLUTIONS:
            return "patches"
        later = search([op.outputs[0]], lambda v: v.successors)
        is_last = not any(weight_of(v.op) is not None for v in later if v is not op.outputs[0])
        return "head" if is_last else "map"

    def _bias(self, where: Tensor, op: Op, source: Op) -> Iterator[Piece]:
        """The bias of a matmul, split as its weight."""
        weight = weight_of(source)
        leaf = None if weight is None else _leaf_behind(weight)
        if weight is None or leaf is None or leaf.name is None:
            yield Piece(Slot(self.at(op.outputs[0]), "bias", "bias"), where.reshape(-1))
            return
        canonical = _rows_first(elements(leaf)[weight], source)
        at, parts = self._parts(leaf.name, canonical, source)
        flat = where.reshape(-1)
        for role, rows in parts.items():
            if len(flat) == canonical.shape[0]:
                used = flat[rows]
            elif len(parts) == 1:
                used = flat
            else:
                continue
            if bool((used >= 0).all()):
                words = "" if len(parts) == 1 else f"entries {int(used[0])}–{int(used[-1])}"
                yield Piece(Slot(at, role, "bias"), used, words=words)

    def _added(self, leaf: Value, where: Tensor, op: Op) -> Piece:
        at = self.at(op.outputs[0])
        if min(at) >= 0 and leaf.numel <= 1:
            return Piece(Slot(at, "bias", "other"), where.squeeze())
        role = "positions"
        if min(at) >= 0:
            role = "relative positions"
        if _table_behind(op, leaf) is not None and role == "positions" and leaf.shape[0] <= 4:
            role = "types"
        return Piece(Slot(at, role, "table"), _whole(leaf, where))


def _whole(leaf: Value, where: Tensor) -> Tensor:
    """The elements in the parameter's own shape without axes of one, where all of them are used."""
    shape = [n for n in leaf.shape if n > 1] or [1]
    if len(where.unique()) == leaf.numel:
        return torch.arange(leaf.numel).reshape(shape)
    return where.reshape([n for n in where.shape if n > 1] or [1])


def _consumes(op: Op) -> bool:
    return bool(op.outputs) and op.outputs[0].live and op.outputs[0].floating


def _leaf_behind(weight: Value) -> Value | None:
    value: Value | None = weight
    while value is not None and value.origin != "parameter":
        value = max((v for v in value.inputs if v.learnt), key=lambda v: v.numel, default=None)
    return value


def _table_behind(op: Op, leaf: Value) -> Value | None:
    """The value of a lookup in `leaf`, with fixed indices, that an op adds."""
    for value in op.inputs:
        if not value.is_weight:
            continue
        for each in search([value], lambda v: v.inputs):
            if each.base in ("embedding", "index", "index_select") and each.inputs[0] is leaf:
                return each
    return None


def _matmul_behind(op: Op, bias: Value) -> Op | None:
    """The parameterised matmul whose output an op adds `bias` to."""
    if bias.numel > 1 and sum(n > 1 for n in bias.shape) > 1:
        return None
    for value in op.inputs:
        if value is bias or not value.live:
            continue
        behind = value.behind(SAME)
        sources = [behind]
        if behind.base == "add":  # x + F(x) + bias: the bias comes after the stream
            sources = sorted((v.behind(SAME) for v in behind.inputs if v.live), key=lambda v: -v.index)
        for source in sources:
            if source.op is not None and weight_of(source.op) is not None:
                same = bias.numel == source.shape[-1] or source.op.base in CONVOLUTIONS
                return source.op if same else None
    return None


def _rows_first(where: Tensor, op: Op) -> Tensor:
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


def _span(rows: Tensor, leaf: Value) -> str:
    """Words for the part of a parameter."""
    firsts = rows.reshape(rows.shape[0], -1)[:, 0]
    others = leaf.numel // leaf.shape[0] if leaf.shape else 1
    lines, name = (firsts // others, "rows") if int(firsts.max()) >= leaf.shape[-1] else (firsts, "columns")
    first, last = int(lines.min()), int(lines.max())
    gaps = "" if last - first + 1 == len(lines.unique()) else f" of {name} {first}–{last}"
    return f"{len(lines.unique())}{gaps}" if gaps else f"{name} {first}–{last}"


def _gate_and_up(op: Op) -> dict[str, Tensor] | None:
    """Rows of the gate and of the up half of a fused matmul: the product has one squashed and one plain."""
    output = op.outputs[0]
    known = features(output)
    for value, numbers in known.items():
        for user in value.users:
            if user.base != "mul" or len(user.inputs) != 2 or not user.outputs:
                continue
            a, b = user.inputs
            other = b if a is value else a
            source = _squashed_source(other, known)
            if source is None or source is value or not a.live or not b.live:
                continue
            up, gate = numbers.flatten().unique(), known[source].flatten().unique()
            if len(up) == len(gate) and not set(up.tolist()) & set(gate.tolist()):
                return {"gate": _in_order(known[source]), "up": _in_order(numbers)}
    return None


def _in_order(numbers: Tensor) -> Tensor:
    """The features in the order of the last axis."""
    return numbers.reshape(-1, numbers.shape[-1])[0]


def _squashed_source(value: Value, known: Mapping[Value, Tensor]) -> Value | None:
    """The part behind an activation function; None where the value is a plain part itself."""
    if value in known and value.base in SAME | VIEWS | {"slice", "split", "chunk", "unbind", "select"}:
        return None
    seen = 0
    queue = [value]
    while queue and seen < 64:
        here = queue.pop(0)
        seen += 1
        if here in known and (
            here.base not in ("mul", "add", "tanh", "sigmoid", "exp", "neg", "clamp", "pow")
        ):
            return here
        queue += [v for v in here.inputs if v.live]
    return None
