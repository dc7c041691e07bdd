"""From the graph to the `Anatomy`: stacks of blocks of branches, with their sites.

The last add of a stack takes the placement of its peers: a norm after it is the stream's in a Post-LN stack,
and the final norm otherwise.
"""

import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

from normscope.anatomy.attention import Attention, find_attentions
from normscope.anatomy.axes import name_axes
from normscope.anatomy.blocks import Group, common_path, group_sums
from normscope.anatomy.branches import Limb, read_limbs
from normscope.anatomy.gaps import dropped_sums, lost_parts, missing_from, opaque_ops
from normscope.anatomy.graph import Gap, Graph, Value, between
from normscope.anatomy.long_skips import Rejoin, find_rejoins
from normscope.anatomy.nesting import untangle
from normscope.anatomy.norms import FoundNorm, find_norms
from normscope.anatomy.projections import owner, read_projections
from normscope.anatomy.residual import Sum, find_sums
from normscope.anatomy.schemes import Traits, combine, traits_of
from normscope.anatomy.several import mixed_sums, one_stream, shared_terms
from normscope.anatomy.stacks import Strand, name_stacks, strands
from normscope.anatomy.streams import Link, came_from, link, nearest, norms_on
from normscope.anatomy.terms import Factor, Term, core, scale_step
from normscope.anatomy.types import (
    Anatomy,
    AttentionSites,
    Block,
    Branch,
    Kind,
    LongSkip,
    Norm,
    Stack,
    at_call,
)
from normscope.anatomy.whole import schemes_of

NO_RESIDUAL_SUM = "no residual sum was found: no add whose one term is read by another through learnt weights"


@dataclass(eq=False)
class Reading:
    """Everything found in one graph, before it is put into words."""

    graph: Graph
    norms: dict[Value, FoundNorm]
    attentions: list[Attention]
    limbs: dict[Sum, list[Limb]] = field(default_factory=dict)
    links: dict[Sum, Link] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    unread: list[Gap] = field(default_factory=list)
    stream_norm: dict[Sum, list[FoundNorm]] = field(default_factory=dict)
    traits: dict[Limb, Traits] = field(default_factory=dict)
    schemes: dict[Limb, str | None] = field(default_factory=dict)
    rejoins: list[Rejoin] = field(default_factory=list)


def assemble(graph: Graph) -> Anatomy:
    """The anatomy of a recorded forward; where a rule of ours breaks on it, one that says so."""
    try:
        return _assemble(graph)
    except Exception as error:  # whatever a model does, its reading ends in words
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = f"our rule {frame.name} ({Path(frame.filename).name}:{frame.lineno}) cannot follow this model"
        return Anatomy(
            (), (f"{words}: {type(error).__name__}: {error}. Please report it.",), graph.written_bytes
        )


def _assemble(graph: Graph) -> Anatomy:
    name_axes(graph.values)
    reading = Reading(graph, find_norms(graph.ops), find_attentions(graph.ops))
    reading.unread += opaque_ops(graph)
    stream = untangle(_sums(reading), reading.norms)
    reading.unread += stream.unread
    reading.limbs = {s: read_limbs(s, reading.norms, reading.attentions) for s in stream.sums}
    sums = [s for s in stream.sums if reading.limbs[s]]
    owners = {
        op: path for s in sums for limb in reading.limbs[s] for op in limb.mixers if (path := owner(op))
    }
    reading.groups = group_sums(sums, reading.limbs, owners)
    kept = [s for group in reading.groups for s in group.sums]
    reading.unread += dropped_sums([s for s in sums if s not in set(kept)], kept, reading.limbs)
    by_value = {s.value: s for s in kept}
    reading.links = {s: link(s, by_value, reading.norms) for s in kept}
    found = strands(reading.groups, reading.links, reading.unread)
    for strand in found:
        _stream_norms(reading, strand)
        _schemes(reading, strand)
    names = name_stacks(found, reading.limbs)
    stacks = [_stack(reading, strand, name) for strand, name in zip(found, names, strict=True)]
    reading.unread += lost_parts(reading.links, reading.attentions)
    missing = missing_from(reading.unread, [_way(reading, strand) for strand in found])
    stacks = [replace(stack, complete=number not in missing) for number, stack in enumerate(stacks)]
    words = [gap.words for gap in reading.unread] + ([] if stacks else [NO_RESIDUAL_SUM])
    return Anatomy(tuple(stacks), tuple(dict.fromkeys(words)), graph.written_bytes)


def _way(reading: Reading, strand: Strand) -> set[Value]:
    """The values from a stack's entry to its end."""
    return set(between(strand.groups[0].sums[0].skip, _leaving(reading, strand.groups[-1].sums[-1])))


def _sums(reading: Reading) -> list[Sum]:
    """The sums that add a branch to the stream; of those that one branch feeds into several streams, one."""
    graph, norms = reading.graph, reading.norms
    mixed, shared = mixed_sums(graph), shared_terms(graph)
    found = mixed + find_sums(graph, norms, reading.attentions, {s.op for s in mixed})
    found.sort(key=lambda s: s.value.index)
    reading.rejoins = find_rejoins(found, norms)
    rejoined = {rejoin.total for rejoin in reading.rejoins}
    return one_stream([s for s in found if s not in rejoined], shared, norms)


def _stream_norms(reading: Reading, strand: Strand) -> None:
    """The norms between each sum and the next; for the last sum, what its peers have."""
    sums = [s for group in strand.groups for s in group.sums]
    followed = {link.before: link for s in sums[1:] if (link := reading.links[s]).direct}
    for s, linked in followed.items():
        if s is not None:
            reading.stream_norm[s] = linked.norms
    direct = [s for s in sums if s in followed]
    for last in sums:
        if last not in followed:
            reading.stream_norm[last] = _as_peers(reading, last, direct)


def _schemes(reading: Reading, strand: Strand) -> None:
    """The traits of every branch, and its name in view of the whole stack."""
    blocks = [[limb for s in group.sums for limb in reading.limbs[s]] for group in strand.groups]
    for limb in (limb for block in blocks for limb in block):
        after = reading.stream_norm.get(limb.sum, [])
        reading.traits[limb] = traits_of(limb, after, reading.norms)
    names = schemes_of([[reading.traits[limb] for limb in block] for block in blocks], not reading.unread)
    for block, found in zip(blocks, names, strict=True):
        reading.schemes.update(zip(block, found, strict=True))


def _as_peers(reading: Reading, last: Sum, direct: list[Sum]) -> list[FoundNorm]:
    """The norm on the last sum of a stage, where its peers have one; alone, where nothing else is normed.

    Peers are joined alike (KEEL's and Mix-LN's first blocks are not), and stand at the same place of their
    blocks where there are such.
    """
    like = [s for s in direct if _form(reading, s) == _form(reading, last)] or direct
    peers = [s for s in like if _same_place(reading, s, last)] or like
    posts = sum(bool(reading.stream_norm[s]) for s in peers)
    alone = not peers and all(not limb.norms_in and limb.norm_out is None for limb in reading.limbs[last])
    return norms_on(last.value, reading.norms)[:1] if posts * 2 > len(peers) or alone else []


def _form(reading: Reading, s: Sum) -> tuple[object, ...]:
    """What a sum and its branches are like, but for a norm behind it."""
    limbs = reading.limbs[s]
    ends = [(bool(limb.norms_in), limb.norm_out is not None) for limb in limbs]
    return combine(s.stream_factors), len(s.long_skips), ends


def _same_place(reading: Reading, s: Sum, last: Sum) -> bool:
    """Whether both sums stand at the same place of their blocks."""
    at = {t: group.sums.index(t) - len(group.sums) for group in reading.groups for t in group.sums}
    return at[s] == at[last]


def _stack(reading: Reading, strand: Strand, name: str) -> Stack:
    blocks = tuple(_block(reading, group) for group in strand.groups)
    last = strand.groups[-1].sums[-1]
    leaving = _leaving(reading, last)
    ends = [leaving, *last.beside]
    after = [
        n for v in ends for n in norms_on(v, reading.norms, pooled=True) if not _in_limb(reading, n, last)
    ]
    after = [n for n in after if n not in reading.stream_norm.get(last, [])]
    final = after[0] if after else None
    hidden = _hidden(final, leaving) if final is not None else leaving
    final_norm = _norm(reading, final) if final is not None else None
    return Stack(name, blocks, final_norm, reading.graph.site(hidden), _long_skips(reading, strand))


def _long_skips(reading: Reading, strand: Strand) -> tuple[LongSkip, ...]:
    """The rejoins on the way through a stack and right behind it."""
    members = {s.value for group in strand.groups for s in group.sums}
    of = {s.value: s for s in reading.links}
    readers = {v: group for group in strand.groups for v in came_from(group.sums[0].skip)}
    found: list[LongSkip] = []
    for rejoin in reading.rejoins:
        if any(s.value in members for s in nearest(rejoin.later.value, of)):
            reader = readers.get(rejoin.total.value)
            skip = LongSkip(
                into=at_call(*reader.place) if reader is not None else "",
                source=reading.graph.site(rejoin.earlier[0]),
                sum=reading.graph.site(rejoin.total.value),
                stream_scale=combine([_factors(rejoin.later)]),
                skip_scale=combine(rejoin.total.stream_factors),
            )
            found.append(skip)
    return tuple(found)


def _factors(term: Term) -> tuple[Factor, ...]:
    """The factors of a term, those that its tensor has met already included."""
    value, factors = term.value, term.factors
    while value is not core(value):
        scaled = scale_step(value)
        value, factors = (scaled[0], (*factors, scaled[1])) if scaled is not None else (value.source, factors)
    return factors


def _hidden(final: FoundNorm, leaving: Value) -> Value:
    """Behind the final norm; where it is that of a second stream, the sum with the first."""
    joined = (op.outputs[0] for op in final.output.users if op.base == "add" and leaving in op.inputs)
    return next(joined, final.output)


def _in_limb(reading: Reading, norm: FoundNorm, last: Sum) -> bool:
    """A later branch's own entry norm (a decoder's, reading this stack) is not this stack's final norm."""
    return any(norm in limb.norms_in for s, limbs in reading.limbs.items() if s is not last for limb in limbs)


def _leaving(reading: Reading, total: Sum) -> Value:
    """The stream behind a sum, after its stream norm and what rejoins it."""
    found = reading.stream_norm.get(total)
    return found[-1].output if found else total.value


def _block(reading: Reading, group: Group) -> Block:
    branches = [branch for s in group.sums for branch in _branches(reading, group, s)]
    path, nth = group.place
    return Block(
        path,
        nth,
        tuple(branches),
        entry=reading.graph.site(group.sums[0].entry),
        exit=reading.graph.site(_leaving(reading, group.sums[-1])),
    )


def _branches(reading: Reading, group: Group, total: Sum) -> list[Branch]:
    return [_branch(reading, group, limb) for limb in reading.limbs[total]]


def _branch(reading: Reading, group: Group, limb: Limb) -> Branch:
    total, graph = limb.sum, reading.graph
    after, traits = reading.stream_norm.get(total, []), reading.traits[limb]
    path, call = _path(group, limb)
    if limb.norms_in and limb.raw_entry:
        reading.unread.append(Gap(f"{path} reads the stream both normed and as it is", limb.output))
    if limb.output.op is not None and limb.output.op.virtual and limb.output.base != "alias":
        words = f"{limb.output.op.name} adds the branch of {path} as it makes it: no output of its own"
        reading.unread.append(Gap(words, limb.output))
    ends = [limb.norm_out] if limb.norm_out is not None else []
    slots = [*limb.norms_in, *ends, *after]
    return Branch(
        kind=_kind(reading, limb),
        placement=traits.placement,
        norm=slots[0].kind if slots else "none",
        path=path,
        call=call,
        join=traits.join,
        stream_scale=traits.stream,
        branch_scale=traits.branch,
        scheme=reading.schemes[limb],
        entry=graph.site(_entry(limb)),
        output=graph.site(limb.output),
        sum=graph.site(total.value),
        norms=tuple(_norm(reading, norm) for norm in slots),
        fused=limb.fused,
        projections=read_projections(graph, limb),
        attention=tuple(_attention_sites(graph, a) for a in limb.attentions),
    )


def _entry(limb: Limb) -> Value:
    """The stream as the branch reads it; of several streams, what is made of them for it to read."""
    if limb.sum.several == "beside" and limb.norms_in and not limb.raw_entry:
        return limb.norms_in[0].input
    return limb.sum.entry if limb.sum.read is None else limb.sum.read


def _kind(reading: Reading, limb: Limb) -> Kind:
    """Keys from an earlier, longer state of the same stream (Funnel pools its queries) are no other."""
    before = reading.links[limb.sum].before
    if limb.kind != "cross-attention" or before is None:
        return limb.kind
    by_value = {s.value: s for s in reading.links}
    same = all(before in nearest(a.key, by_value) for a in limb.attentions)
    return "attention" if same else "cross-attention"


def _path(group: Group, limb: Limb) -> tuple[str, int]:
    """The innermost module that holds the branch's matmuls; the last one's where that is the block itself."""
    owners = [path for op in limb.mixers if (path := owner(op)) is not None]
    block, nth = group.place
    if not owners:
        return limb.mixers[-1].call.path, limb.mixers[-1].call.nth
    path = common_path(owners)
    if path == block or not path.startswith(block):
        path = owners[-1]
    calls = {call.path: call.nth for op in limb.mixers for call in op.call.around()}
    return path, calls.get(path, nth)


def _norm(reading: Reading, norm: FoundNorm) -> Norm:
    weight = norm.weight.name if norm.weight is not None else None
    return Norm(
        norm.kind,
        norm.core.call.path,
        reading.graph.site(norm.input),
        reading.graph.site(norm.output),
        norm.eps,
        weight,
        norm.weight_offset,
    )


def _attention_sites(graph: Graph, a: Attention) -> AttentionSites:
    return AttentionSites(*(graph.site(v) for v in (a.query, a.key, a.value, a.logits, a.probabilities)))
