"""Say what was not read, and which stacks it is missing from."""

from collections.abc import Iterable

from normscope.anatomy.attention import Attention
from normscope.anatomy.branches import Limb
from normscope.anatomy.graph import Gap, Graph, Value, between
from normscope.anatomy.ops import mixes_between
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import Link


def opaque_ops(graph: Graph) -> list[Gap]:
    """Ops that hide what they compute."""
    calls = {op.name: [o for o in graph.opaque if o.name == op.name] for op in graph.opaque}
    return [
        Gap(
            f"{name} in {place(ops[0].outputs[0])} is opaque ({len(ops)} calls): what it does is not seen",
            value,
        )
        for name, ops in calls.items()
        for value in (op.outputs[0] for op in ops)
    ]


def dropped_sums(dropped: list[Sum], kept: list[Sum], limbs: dict[Sum, list[Limb]]) -> list[Gap]:
    """Sums of no block. One before the first block belongs to the embedding, unless it attends."""
    first = min((s.value.index for s in kept), default=0)
    return [
        Gap(f"a residual sum outside any repeated module, in {place(s.value)}", s.value)
        for s in dropped
        if s.value.index > first or any(limb.attentions for limb in limbs[s])
    ]


def lost_parts(links: dict[Sum, Link], attentions: list[Attention]) -> list[Gap]:
    """What attends, or mixes without changing the shape, between a sum and the next."""
    found: list[Gap] = []
    for total, linked in links.items():
        if linked.before is None or linked.direct:
            continue
        start = linked.before.value
        way = between(start, total.skip)
        attends = any(a.output in set(way) for a in attentions)
        if attends or (start.shape == total.skip.shape and mixes_between(start, total.skip)):
            words = f"what lies between {place(start)} and {place(total.value)} is in no residual sum"
            found.append(Gap(words, total.skip))
    return found


def missing_from(gaps: Iterable[Gap], ways: list[set[Value]]) -> set[int]:
    """The stacks, by the values on their ways, that a gap is in; one on no stack's way is in all."""
    missing: set[int] = set()
    for gap in gaps:
        holding = {number for number, way in enumerate(ways) if gap.at in way}
        missing |= holding or set(range(len(ways)))
    return missing


def place(value: Value) -> str:
    """The module in which a value came to be, in words."""
    return (value.op.call.path if value.op is not None else "") or "the root module"
