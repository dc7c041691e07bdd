"""Places of the steps of a walk in a recorded forward: sites, with the layouts that the graph's axes give."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.utils._pytree import tree_leaves

from normscope.anatomy import Anatomy, Branch, Norm, Projection, Site
from normscope.anatomy.graph import Graph, Op, Value, ancestors
from normscope.anatomy.ops import CONVOLUTIONS, SAME, matmul_operands, weight_of
from normscope.anatomy.projections import parameter_of, reshaped
from normscope.compare.keys import OUTSIDE, Key, way_in
from normscope.compare.layout import Layout, heads_first, pairs_last, tokens_first
from normscope.compare.norms import bias_added

_OPERANDS: dict[str, Callable[[Value], Layout]] = {
    "query": lambda value: heads_first(value, -1),
    "key": lambda value: heads_first(value, -2),
    "value": lambda value: heads_first(value, -1),
    "logits": pairs_last,
    "probabilities": pairs_last,
}
"""Tensor of an attention → its layout."""


@dataclass(frozen=True)
class Place:
    """A tensor of the walk before it is captured: its key, its name for a person, its site, its layout.

    `others` are the places of the other heads, where each head has an attention of its own.
    """

    key: Key
    name: str
    site: Site
    layout: Layout | None
    index: int
    others: tuple["Place", ...] = ()


def places_of(anatomy: Anatomy, maker: "PlaceMaker") -> Iterator[Place]:
    found: list[Place] = []
    for s, stack in enumerate(anatomy.stacks):
        if (embedded := maker.embedding(stack.blocks[0].entry if s else None)) is not None:
            found.append(maker.place((*way_in(s), "embedding"), "embedding", embedded.site))
    if (norm := maker.embedding_norm(anatomy)) is not None:
        key = (OUTSIDE, OUTSIDE, OUTSIDE)
        found.append(maker.place((*key, "embedding norm in"), norm.path, norm.input))
        found.append(maker.place((*key, "embedding norm"), norm.path, norm.output))
    for s, stack in enumerate(anatomy.stacks):
        for b, block in enumerate(stack.blocks):
            found.append(maker.place((s, b, OUTSIDE, "entry"), block.site, block.entry))
            for n, branch in enumerate(block.branches):
                found += maker.branch((s, b, n), branch)
            end = maker.biased(block.exit) or block.exit
            found.append(maker.place((s, b, OUTSIDE, "exit"), block.site, end))
        if stack.final_norm is not None:
            key, norm = (s, OUTSIDE, OUTSIDE), stack.final_norm
            found.append(maker.place((*key, "final norm in"), norm.path, norm.input))
            found.append(maker.place((*key, "final norm"), norm.path, norm.output))
        found.append(maker.place((s, OUTSIDE, OUTSIDE, "hidden"), stack.name, stack.hidden))
    return iter(found)


class PlaceMaker:
    """Makes places of sites, with the layouts that the graph's axes give."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        ops = [op for op in graph.ops if not op.virtual]
        self.values = {op.site(i): value for op in ops for i, value in enumerate(op.outputs)}
        self.by_parameter: dict[str, list[Op]] = {}
        for op in graph.ops:
            parameter = parameter_of(op) if weight_of(op) is not None else None
            if parameter is not None and parameter.name is not None:
                self.by_parameter.setdefault(parameter.name, []).append(op)

    def value(self, site: Site) -> Value | None:
        """The graph's value at a site; inputs of ops are found as well."""
        if site.output >= 0:
            return self.values.get(site)
        for op in self.graph.ops:
            if not op.virtual and op.site(0) == Site(site.module, site.call, site.op, site.nth):
                tensors = [v for v in tree_leaves((op.args, op.kwargs)) if isinstance(v, Value)]
                return tensors[-1 - site.output]
        return None

    def place(
        self, key: Key, name: str, site: Site, layout: Callable[[Value], Layout] = tokens_first
    ) -> Place:
        value = self.value(site)
        return Place(key, name, site, None if value is None else layout(value), value.index if value else -1)

    def heads(self, key: Key, name: str, sites: Sequence[Site], layout: Callable[[Value], Layout]) -> Place:
        """The place of an attention's tensor, with those of the others where each of them is of one head."""
        first, *others = (self.place(key, name, site, layout) for site in sites)
        shapes = {place.layout.merged if place.layout is not None else () for place in (first, *others)}
        shape = next(iter(shapes))
        if not others or len(shapes) > 1 or len(shape) != 4 or shape[1] != 1:
            return first
        return replace(first, index=others[-1].index, others=tuple(others))

    def embedding(self, before: Site | None = None) -> Value | None:
        """The output of the first table that is looked up by the model's input; on the way to a site."""
        ops = [op for op in self.graph.ops if op.base in ("embedding", "index", "index_select")]
        end = None if before is None else self.value(before)
        behind = None if end is None else ancestors([end], -1)
        return next(
            (
                op.outputs[0]
                for op in ops
                if op.outputs and op.outputs[0].live and op.inputs[0].is_weight
                if behind is None or op.outputs[0] in behind
            ),
            None,
        )

    def embedding_norm(self, anatomy: Anatomy) -> Norm | None:
        """The norm whose output is the stream at the entry of the first block."""
        if not anatomy.blocks:
            return None
        value = self.value(anatomy.blocks[0].entry)
        found = None if value is None else value.behind(SAME).norm
        if found is None:
            return None
        weight = None if found.weight is None else found.weight.name
        sites = found.input.site, found.output.site
        return Norm(found.kind, found.core.call.path, *sites, found.eps, weight, found.weight_offset)

    def branch(self, at: tuple[int, int, int], branch: Branch) -> list[Place]:
        """The places of a branch, in the order of the forward; `sum` comes last of those that tie."""
        found = [self.place((*at, "entry"), branch.site, branch.entry)]
        biased = self.biased(branch.sum)
        for n, norm in enumerate(branch.norms):
            found.append(self.place((*at, f"norm {n} in"), norm.path, norm.input))
            found.append(self.place((*at, f"norm {n}"), norm.path, norm.output))
        for projection in branch.projections:
            name = " and ".join(projection.roles)
            path = projection.parameter.rpartition(".")[0]
            found.append(self.place((*at, name), path, self.mapped(projection)))
            if projection.roles in (("o",), ("down",)):
                op = self.op_of(projection)
                if (read := None if op is None else _read_by(op)) is not None:
                    name = "mixed" if projection.roles == ("o",) else "act"
                    found.append(self.place((*at, name), path, read.site))
        for role, layout in _OPERANDS.items():
            sites = [getattr(attention, role) for attention in branch.attention]
            if sites:
                found.append(self.heads((*at, role), branch.site, sites, layout))
        found.append(self.place((*at, "output"), branch.site, branch.output))
        found.append(self.place((*at, "sum"), branch.site, branch.sum if biased is None else biased))
        if biased is not None:  # what is added to the stream lacks the bias
            found = [place for place in found if place.key[3] not in ("o", "down", "output")]
        names: dict[str, int] = {}
        unique = []
        for place in found:
            nth = names[place.key[3]] = names.get(place.key[3], -1) + 1
            numbered = place.key if nth == 0 else (*place.key[:3], f"{place.key[3]} {nth + 1}")
            unique.append(replace(place, key=numbered))
        return sorted(unique, key=lambda place: place.index)

    def mapped(self, projection: Projection) -> Site:
        """The output of a projection, with the bias that is added once its features are parted into heads."""
        op = self.op_of(projection)
        known, added = self.value(projection.output), None if op is None else bias_added(op)
        is_later = known is not None and added is not None and added.outputs[0].index > known.index
        return added.outputs[0].site if added is not None and is_later else projection.output

    def op_of(self, projection: Projection) -> Op | None:
        """The matmul of a projection; of a parameter with a slice for each layer, that of its layer."""
        ops = self.by_parameter.get(projection.parameter, [])
        made = (op for op in ops if reshaped(op.outputs[0]).site == projection.output)
        return next(made, ops[0] if ops else None)

    def biased(self, site: Site) -> Site | None:
        """The sum with a bias that is added to it right after the join, as in `x + y @ w + bias`."""
        value = self.value(site)
        users = [] if value is None else value.users
        for op in users:
            terms = [v for v in op.inputs if v is not value]
            if op.base == "add" and len(terms) == 1 and terms[0].is_weight and len(terms[0].shape) == 1:
                return op.outputs[0].site
        return None


def _read_by(op: Op) -> Value | None:
    """The activation that a parameterised matmul or convolution reads."""
    if op.base in CONVOLUTIONS:
        return op.source
    operands, weight = matmul_operands(op), weight_of(op)
    if operands is None:
        return None
    first, second = operands
    return second if first is weight else first
