"""Report parts that were not read, and the stacks that lack them."""

from collections.abc import Iterable, Iterator

from normscope.anatomy.attention import Attention
from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Gap, Graph, Op, Value, between
from normscope.anatomy.ops import mixes_between
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import link, step_back
from normscope.anatomy.written import OwnFactor


def opaque_ops(graph: Graph) -> list[Gap]:
    """Ops that hide what they compute."""
    calls = {op.name: [o for o in graph.opaque if o.name == op.name] for op in graph.opaque}
    return [
        Gap(
            f"{name} in {module_of(ops[0])} is opaque ({len(ops)} calls): its function is unknown",
            op.outputs[0],
        )
        for name, ops in calls.items()
        for op in ops
    ]


def dropped_sums(dropped: list[Sum], kept: list[Sum]) -> list[Gap]:
    """Sums outside of blocks. A sum before the first block belongs to the embedding, unless it attends."""
    first = min((s.value.index for s in kept), default=0)
    return [
        Gap(f"a residual sum outside any repeated module, in {module_of(s.value.op)}", s.value)
        for s in dropped
        if s.value.index > first or any(branch.attentions for branch in s.branches)
    ]


def unseen_ends(branch: FoundBranch, path: str) -> list[Gap]:
    """A branch whose entry is read twice, or whose output is no tensor."""
    found: list[Gap] = []
    made_by = branch.output.op
    if branch.norms_in and branch.raw_entry:
        found.append(Gap(f"{path} reads the stream both with and without a norm", branch.output))
    if made_by is not None and made_by.virtual and made_by.base != "alias":
        words = f"{made_by.name} computes and adds the branch of {path} in one op: it has no output tensor"
        found.append(Gap(words, branch.output))
    return found


def own_factors(factors: list[OwnFactor], sums: list[Sum]) -> list[Gap]:
    """Factors of a tensor's own, no known norms, on the stream, at the entry or at the end of a branch."""
    points = {v for s in sums for v in (s.value, s.skip, s.entry, s.start, s.leaving)}
    ends = {value for s in sums for b in s.branches for value in _way_back(b.output)}
    placed = [f for f in factors if f.part.end in ends or not points.isdisjoint(_way_back(f.part.start))]
    return [Gap(_words(factor), factor.part.end) for factor in placed]


def _way_back(value: Value) -> Iterator[Value]:
    """`value`, and what it was before scales, views and norms."""
    here: Value | None = value
    while here is not None:
        yield here
        here = here.norm.input if here.norm is not None else step_back(here)


def _words(factor: OwnFactor) -> str:
    made = f"{module_of(factor.part.end.op)} multiplies a tensor by a factor that is computed from it"
    reason = "its ops cannot run again" if factor.scaling is None else "it is no known norm"
    return f"{made}: {reason}"


def lost_parts(sums: list[Sum], attentions: list[Attention]) -> list[Gap]:
    """Parts that attend, or mix without changing the shape, between a sum and the next."""
    found: list[Gap] = []
    for total in sums:
        linked = link(total)
        if linked.before is None or linked.direct:
            continue
        start = linked.before.value
        way = set(between(start, total.skip))
        attends = any(a.output in way for a in attentions)
        if attends or (start.shape == total.skip.shape and mixes_between(start, total.skip)):
            ends = f"{module_of(start.op)} and {module_of(total.value.op)}"
            found.append(Gap(f"the part between {ends} is in no residual sum", total.skip))
    return found


def missing_from(gaps: Iterable[Gap], ways: list[set[Value]]) -> set[int]:
    """Numbers of the stacks, given by their values, that a gap is in; all stacks where it is in none."""
    missing: set[int] = set()
    for gap in gaps:
        holding = {number for number, way in enumerate(ways) if gap.at in way}
        missing |= holding or set(range(len(ways)))
    return missing


def module_of(op: Op | None) -> str:
    """Name of the module in which an op ran, for messages."""
    return (op.call.path if op is not None else "") or "the root module"
