"""Find the uses of all parameters and computed weights in the graph of one forward."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from normscope.anatomy import Branch, Site
from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import CONVOLUTIONS, MATMULS, SAME, weight_of
from normscope.anatomy.projections import parameter_of, reshaped
from normscope.compare.fused import RowsOf, attention_rows, gate_and_up
from normscope.compare.indices import elements
from normscope.compare.keys import OUTSIDE, At, Key, way_in
from normscope.compare.made import made_in, read_by, sources, values_of
from normscope.compare.patch_columns import patch_columns
from normscope.compare.pieces import OUT, Piece, Slot, rows_first, span, stored, whole
from normscope.compare.walk import Twin
from normscope.probes.roles import OPERANDS

_READ: dict[tuple[str, ...], str] = {("o",): "mixed", ("down",): "act"}
"""Role of a map → the step of what it reads."""


class Uses:
    """Finds the uses of all parameters in the graph of one forward."""

    def __init__(self, twin: Twin) -> None:
        self.twin, self.anatomy, self.graph = twin, twin.anatomy, twin.graph
        self.index = {
            op.site(i): value.index
            for op in self.graph.ops
            if not op.virtual
            for i, value in enumerate(op.outputs)
        }
        self.ends: list[tuple[int, At]] = []  # index of the last value of each branch, in order
        self.starts: list[tuple[int, int]] = []  # first value of each stack, and its last
        self.roles: dict[str, dict[At, tuple[str, ...]]] = {}  # layers may share a parameter, or have slices
        self.norms: dict[Site, tuple[At, str]] = {}
        self._read_anatomy()
        self.inside = dict(self._norm_ops())
        self.made = made_in(self.graph, twin.model)
        self.computed = values_of(self.made, twin.own)
        self.names = {value: each.name for each in self.made for value in each.values}
        self.raw = {each.name: each.raw for each in self.made if each.raw is not None}
        self.fused = self._fused()
        self.seen: dict[Slot, int] = {}
        self.numbers: dict[tuple[Op, Slot], int] = {}
        self.order: dict[str, int] = {}  # of the first uses
        self.columns: dict[Op, Tensor] = {}  # in the order of a parameter that has several axes of them

    def _read_anatomy(self) -> None:
        for s, stack in enumerate(self.anatomy.stacks):
            for b, block in enumerate(stack.blocks):
                for n, branch in enumerate(block.branches):
                    at = (s, b, n)
                    self.ends.append((self._index(branch.sum), at))
                    for projection in branch.projections:
                        self.roles.setdefault(projection.parameter, {})[at] = projection.roles
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
        """The ops of each norm, from its first to its last."""
        for value in self.graph.values:
            norm = value.norm
            inner = norm.inside if norm is not None else ()
            yield from ((each.op, norm) for each in inner if norm is not None and each.op is not None)
            while norm is not None and value.op is not None:
                yield value.op, norm
                if value.op is norm.core:
                    break
                value = next((v for v in value.inputs if v.live), value.inputs[0])

    def at(self, value: Value) -> At:
        """The branch in whose computation a value lies."""
        for s, (first, last) in enumerate(self.starts):
            if value.index <= first and (s == 0 or value.index > self.starts[s - 1][1]):
                return way_in(s)
            if first < value.index <= last:
                return next((at for end, at in self.ends if value.index <= end), (s, OUTSIDE, OUTSIDE))
        return (len(self.starts) - 1, OUTSIDE, OUTSIDE) if self.starts else OUT

    def _fused(self) -> dict[Op, RowsOf]:
        """Features of each role in the output of each map of several roles."""
        found: dict[Op, RowsOf] = {}
        branches: dict[Op, Branch] = {}
        for op in self.graph.ops:
            at, roles = self._role_of(op)
            branch = self._branch(at)
            if len(roles) < 2 or branch is None:
                continue
            if set(roles) <= set(OPERANDS):
                branches[op] = branch
            elif set(roles) == {"gate", "up"} and (halves := gate_and_up(op)) is not None:
                found[op] = halves
        return found | self._looked_up(branches)

    def _looked_up(self, branches: Mapping[Op, Branch]) -> dict[Op, RowsOf]:
        """Features of q, k and v in the outputs of maps, and computed weights that Replay cannot tell."""
        outputs = {op: reshaped(op.outputs[0]).site for op in branches}
        sites = {s for b in branches.values() for a in b.attention for s in (a.query, a.key, a.value)}
        missing = {each.name: each.values[0].site for each in self.made if each.name not in self.computed}

        def read(captured: Mapping[Site, Tensor]) -> dict[Op, RowsOf]:
            self.computed |= {name: captured[site].detach().clone() for name, site in missing.items()}
            known: dict[Op, RowsOf] = {}
            first: dict[str | None, RowsOf] = {}  # a shared module's later calls are in other blocks
            for op, branch in branches.items():
                rows = attention_rows(branch, captured.get(outputs[op]), captured)
                known[op] = rows or first.get(self._parameter(op), {})
                first.setdefault(self._parameter(op), rows)
            return known

        wanted = {*sites, *outputs.values(), *missing.values()}
        return self.twin.look(wanted, read) if wanted else {}

    def _parameter(self, op: Op) -> str | None:
        """The parameter behind the weight of a map."""
        leaf = parameter_of(op) if op.outputs and weight_of(op) is not None else None
        return None if leaf is None else leaf.name

    def pieces(self) -> dict[str, list[Piece]]:
        """The pieces of each parameter and each computed weight, in the order of their uses."""
        leaves = [v for v in self.graph.values if v.origin == "parameter" and v.name is not None]
        starts = {leaf: leaf.name or "" for leaf in leaves}
        starts |= self.names
        uses = []
        for start, name in starts.items():
            numbers = elements(start)
            for value in search([start], lambda v: (each for each in v.successors if each.is_weight)):
                where = numbers.get(value)
                users = (op for op in value.users if _consumes(op))
                uses += [(op.outputs[0].index, name, start, value, where, op) for op in users]
        uses.sort(key=lambda use: use[0])
        self.order = {name: n for n, name in enumerate(dict.fromkeys(name for _, name, *_ in uses))}
        found: dict[str, list[Piece]] = {}
        done: set[tuple[str, Op]] = set()
        for _, name, start, value, where, op in uses:
            if (name, op) in done:
                continue
            done.add((name, op))
            known = list(found.get(name, ()))
            for piece in self._use(start, name, value, where, op):
                if not any(_is_repeated(piece, other) for other in known):
                    found.setdefault(name, []).append(self._numbered(piece, op, is_made=name in self.raw))
        return found

    def _numbered(self, piece: Piece, op: Op, *, is_made: bool) -> Piece:
        """The piece with its number; a computed weight has that of the parameter that it is computed from."""
        slot = piece.slot
        nth = self.numbers.get((op, slot)) if is_made else None
        if nth is None:
            nth = self.seen[slot] = self.seen.get(slot, -1) + 1
            self.numbers[op, slot] = nth
        return replace(piece, slot=replace(slot, nth=nth), is_twofold=piece.is_twofold or is_made)

    def rows(self) -> dict[Key, RowsOf]:
        """Features of each role in the step of each fused projection, and of what a map reads."""
        found: dict[Key, RowsOf] = {}
        for op, columns in self.columns.items():
            at, roles = self._role_of(op)
            found.setdefault((*at, _READ[roles]), {_READ[roles]: columns})
        for op, rows in self.fused.items():
            at, roles = self._role_of(op)
            if set(rows) == set(roles):
                found.setdefault((*at, " and ".join(roles)), rows)
        return found

    def _use(self, start: Value, name: str, value: Value, where: Tensor | None, op: Op) -> Iterator[Piece]:
        """The uses of a parameter or a computed weight, `start`, in an op that reads `value`."""
        norm = self.inside.get(op)
        is_weight = read_by(op) is value
        computed = [] if not is_weight else [s for s in sources(value) if s in self.names and s is not start]
        if computed and start not in sources(value):
            if where is not None and any(self.raw.get(self.names[each]) == name for each in computed):
                pieces = self._weight(start, where, value, op)
                yield from (replace(piece, is_twofold=True) for piece in pieces)
        elif where is None:  # looked up with indices that are not recorded, or computed
            if op.base in ("add", "sub", "cat") and min(start.shape, default=0) > 0:
                yield self._added(start, torch.arange(start.numel).reshape(start.shape), op)
            elif weight_of(op) is value and (role := self._role(op)) is not None:
                yield Piece(Slot(*role, "other"), torch.arange(start.numel).reshape(start.shape))
        elif norm is not None:
            yield from self._norm_piece(start, value, where, norm)
        elif is_weight:
            yield from self._weight(start, where, value, op)
        elif op.base in MATMULS | CONVOLUTIONS:
            yield from self._bias(where, op, op)
        elif op.base in ("add", "sub") and (source := _matmul_behind(op, value)) is not None:
            yield from self._bias(where, op, source)
        elif op.base in ("add", "sub"):
            yield self._added(start, where, op)
        elif op.base in ("mul", "div"):
            yield Piece(Slot(self.at(op.outputs[0]), "scale", "scale"), whole(start, where))
        else:
            yield Piece(Slot(self.at(op.outputs[0]), op.base, "other"), whole(start, where))

    def _weight(self, start: Value, where: Tensor, value: Value, op: Op) -> Iterator[Piece]:
        """The use as a matrix of a map, or as a table."""
        if weight_of(op) is value:
            yield from self._matrix(start, where, op)
        else:
            yield Piece(Slot(self.at(op.outputs[0]), "embedding", "table"), where)

    def _norm_piece(self, leaf: Value, value: Value, where: Tensor, norm: FoundNorm) -> Iterator[Piece]:
        """The use of `leaf` in a norm that reads `value` of it, such as the slice of a layer."""
        at, role = self._norm_role(norm)
        flat = where.squeeze() if where.numel() > 1 else where.reshape(1)
        gain = norm.weight
        if gain is not None and (gain.name == leaf.name or gain in search([value], lambda v: v.inputs)):
            yield Piece(Slot(at, role, "gain"), flat, norm.weight_offset)
        else:
            yield Piece(Slot(at, role, "shift" if leaf.numel > 1 else "other"), flat)

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

    def _matrix(self, start: Value, where: Tensor, op: Op) -> Iterator[Piece]:
        canonical = rows_first(where, op)
        at, parts = self._parts(op, canonical.shape[0])
        if "patches" in parts and canonical.ndim == 2 and (columns := patch_columns(op)) is not None:
            canonical = canonical[:, columns]
        if len(start.shape) > 2 and tuple(parts) in _READ and (columns := stored(canonical)) is not None:
            self.columns[op] = columns
            canonical = canonical[:, columns]
        turned = canonical.ndim == 2 and bool(canonical[0, -1] - canonical[0, 0] >= canonical.shape[1] > 1)
        for role, rows in parts.items():
            own = canonical[rows]
            own = own[(own >= 0).flatten(1).all(1)]  # without what is joined with it
            if not len(own):
                continue
            words = [] if own.numel() == start.numel else [span(own, start)]
            if turned:
                words.append("transposed")
            yield Piece(Slot(at, role, "matrix"), own, words=", ".join(words))

    def _role(self, op: Op) -> tuple[At, str] | None:
        """The branch and the role of a map; None outside of the branches."""
        at, roles = self._role_of(op)
        return (at, "+".join(roles)) if roles else None

    def _role_of(self, op: Op) -> tuple[At, tuple[str, ...]]:
        """The branch of a map and its roles there; none outside of the branches."""
        places = self.roles.get(self._parameter(op) or "", {})
        at = self.at(op.outputs[0]) if places else OUT
        return (at, places[at]) if at in places else next(iter(places.items()), (OUT, ()))

    def _parts(self, op: Op, num: int) -> tuple[At, dict[str, Tensor]]:
        """The rows of a map's output, of which there are `num`, by role."""
        role = self._role(op)
        if role is None:
            return self.at(op.outputs[0]), {self._outside_role(op): torch.arange(num)}
        rows = self.fused.get(op, {})
        if not rows or max(int(each.max()) for each in rows.values()) >= num:
            return role[0], {role[1]: torch.arange(num)}
        return role[0], rows

    def _outside_role(self, op: Op) -> str:
        if op.base in CONVOLUTIONS:
            return "patches"
        later = search([op.outputs[0]], lambda v: v.successors)
        is_last = not any(weight_of(v.op) is not None for v in later if v is not op.outputs[0])
        return "head" if is_last else "map" if patch_columns(op) is None else "patches"

    def _bias(self, where: Tensor, op: Op, source: Op) -> Iterator[Piece]:
        """The bias of a map, split as its weight."""
        rows = where.reshape(-1, where.shape[-1]) if where.dim() else where.reshape(1, 1)
        flat = rows[0] if bool((rows == rows[:1]).all()) else where.reshape(-1)  # it may be expanded
        at, parts = self._parts(source, len(flat))
        if len(flat) == 1:  # one number for all features
            parts = dict.fromkeys(list(parts)[:1], torch.arange(1))
        for role, rows in parts.items():
            used = flat[rows]
            used = used[used >= 0]
            if len(used):
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
        return Piece(Slot(at, role, "table"), whole(leaf, where))


def _is_repeated(piece: Piece, other: Piece) -> bool:
    """Whether a parameter's part has the same use already: a second call of a shared module."""
    same = (piece.slot.role, piece.slot.kind) == (other.slot.role, other.slot.kind)
    return same and torch.equal(piece.elements, other.elements)


def _consumes(op: Op) -> bool:
    return bool(op.outputs) and op.outputs[0].live and op.outputs[0].floating


def _table_behind(op: Op, leaf: Value) -> Value | None:
    """The value of a lookup in `leaf`, with fixed indices, that an op adds."""
    for value in op.inputs:
        if not value.is_weight:
            continue
        for each in search([value], lambda v: v.inputs):
            if each.base in ("embedding", "index", "index_select") and each.inputs[0] is leaf:
                return each
    return None


def _is_broadcast(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a bias of heads, such as (H, 1, K), is added to (B, H, T, K)."""
    last = whole[len(whole) - len(shape) :]
    return len(last) == len(shape) and all(own in (1, size) for own, size in zip(shape, last, strict=True))


def _matmul_behind(op: Op, bias: Value) -> Op | None:
    """The parameterised matmul whose output an op adds `bias` to."""
    bias = bias.behind(SAME)
    shape = tuple(bias.shape)
    is_vector = bias.numel <= 1 or sum(n > 1 for n in shape) <= 1
    for value in op.inputs:
        if not value.live:
            continue
        if not is_vector and not _is_broadcast(shape, value.shape):  # features parted into heads
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
