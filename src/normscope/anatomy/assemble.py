"""Build the `Anatomy` from the graph: stacks of blocks of branches, with their sites.

The last add of a stack takes the placement of its peers: a norm after it is on the stream in a Post-LN stack,
and is the final norm otherwise.
"""

import traceback
from dataclasses import replace
from pathlib import Path

from normscope.anatomy.attention import Attention, find_attentions
from normscope.anatomy.axes import name_axes
from normscope.anatomy.blocks import Group, common_path, group_sums
from normscope.anatomy.branches import FoundBranch, find_branches
from normscope.anatomy.gaps import (
    dropped_sums,
    lost_parts,
    missing_from,
    opaque_ops,
    own_factors,
    unseen_ends,
)
from normscope.anatomy.graph import Graph, Value, between
from normscope.anatomy.long_skips import Rejoin, find_rejoins
from normscope.anatomy.nesting import untangle
from normscope.anatomy.norms import FoundNorm, find_norms
from normscope.anatomy.over_depth import attention_over_depth
from normscope.anatomy.projections import owners, read_projections
from normscope.anatomy.readers import reader_of
from normscope.anatomy.residual import Sum, find_sums, without
from normscope.anatomy.schemes import name_schemes, named_by_long_skips
from normscope.anatomy.several import mixed_sums, one_stream, shared_terms
from normscope.anatomy.stacks import name_stacks, stack_blocks
from normscope.anatomy.streams import came_from, link, nearest, norms_on
from normscope.anatomy.terms import combine, factored
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

NO_RESIDUAL_SUM = "no residual sum was found: no add whose one term is read by another through learnt weights"


def assemble(graph: Graph) -> Anatomy:
    """The anatomy of a recorded forward; where the reading fails, `unread` reports the error."""
    try:
        return _assemble(graph)
    except Exception as error:  # any model must get a result
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = (
            f"normscope's {frame.name} ({Path(frame.filename).name}:{frame.lineno}) cannot read this model"
        )
        return Anatomy(
            (), (f"{words}: {type(error).__name__}: {error}. Please report it.",), graph.written_bytes
        )


def _assemble(graph: Graph) -> Anatomy:
    name_axes(graph.values)
    factors = find_norms(graph.ops)
    attentions = find_attentions(graph.ops)
    over_depth = attention_over_depth(graph.ops)
    if over_depth is not None:
        return Anatomy((), (over_depth,), graph.written_bytes)
    unread = opaque_ops(graph)
    sums, rejoins = _sums(graph, attentions)
    sums, nested = untangle(sums)
    unread += nested
    for s in sums:
        s.branches = find_branches(s, attentions)
    sums = without(sums, {s for s in sums if not s.branches})
    groups = group_sums(sums)
    kept = [s for group in groups for s in group.sums]
    dropped = set(sums) - set(kept)
    unread += dropped_sums([s for s in sums if s in dropped], kept)
    without(sums, dropped)
    found = stack_blocks(groups, unread)
    for stack in found:
        _find_stream_norms(stack)
        blocks = [[branch for s in group.sums for branch in s.branches] for group in stack]
        name_schemes(blocks, complete=not unread)
    named = list(zip(found, name_stacks(found), strict=True))
    stacks = [_stack(stack, name, sums, rejoins, graph) for stack, name in named]
    for group in (group for stack in found for group in stack):
        unread += [gap for s in group.sums for b in s.branches for gap in unseen_ends(b, _path(group, b)[0])]
    unread += lost_parts(kept, attentions) + own_factors(factors, kept)
    ends = [(stack[0].sums[0].skip, stack[-1].sums[-1].leaving) for stack in found]
    missing = missing_from(unread, [set(between(*pair)) for pair in ends])
    stacks = [
        named_by_long_skips(replace(stack, complete=number not in missing))
        for number, stack in enumerate(stacks)
    ]
    words = [gap.words for gap in unread] + ([] if stacks else [NO_RESIDUAL_SUM])
    return Anatomy(tuple(stacks), tuple(dict.fromkeys(words)), graph.written_bytes)


def _sums(graph: Graph, attentions: list[Attention]) -> tuple[list[Sum], list[Rejoin]]:
    """The sums that add a branch to the stream, one per branch, and the sums that add none."""
    mixed, shared = mixed_sums(graph), shared_terms(graph)
    found = mixed + find_sums(graph, attentions, {s.op for s in mixed})
    found.sort(key=lambda s: s.value.index)
    for s in found:
        s.value.sum = s
    rejoins = find_rejoins(found)
    return one_stream(without(found, {rejoin.total for rejoin in rejoins}), shared), rejoins


def _find_stream_norms(stack: list[Group]) -> None:
    """Find the norms between each sum and the next; the last sum gets those of its peers."""
    indices = {s: n - len(group.sums) for group in stack for n, s in enumerate(group.sums)}
    sums = list(indices)
    followed = {link(s).before: link(s) for s in sums[1:] if link(s).direct}
    for s, linked in followed.items():
        if s is not None:
            s.norms_behind = linked.norms
    direct = [s for s in sums if s in followed]
    for last in sums:
        if last not in followed:
            last.norms_behind = _as_peers(last, direct, indices)


def _as_peers(last: Sum, direct: list[Sum], indices: dict[Sum, int]) -> list[FoundNorm]:
    """The norm on the last sum of a stage where its peers have one; a sum without peers keeps a sole norm.

    Peers have the same join (KEEL's and Mix-LN's first blocks do not), and where possible the same index in
    their blocks.
    """
    like = [s for s in direct if _form(s) == _form(last)] or direct
    peers = [s for s in like if indices[s] == indices[last]] or like
    posts = sum(bool(s.norms_behind) for s in peers)
    alone = not peers and all(not b.norms_in and b.norm_out is None for b in last.branches)
    return norms_on(last.value)[:1] if posts * 2 > len(peers) or alone else []


def _form(s: Sum) -> tuple[object, ...]:
    """Form of a sum and its branches, without a norm after it."""
    ends = [(bool(branch.norms_in), branch.norm_out is not None) for branch in s.branches]
    return combine(s.stream_factors), len(s.long_skips), ends


def _stack(stack: list[Group], name: str, sums: list[Sum], rejoins: list[Rejoin], graph: Graph) -> Stack:
    last = stack[-1].sums[-1]
    # A later branch's own entry norm (a decoder's, reading this stack) is not this stack's final norm.
    taken = [norm for s in sums if s is not last for branch in s.branches for norm in branch.norms_in]
    ends = [last.leaving, *last.beside]
    after = [norm for v in ends for norm in norms_on(v, pooled=True) if norm not in taken]
    final = after[0] if after else None
    return Stack(
        name,
        tuple(_block(group) for group in stack),
        _norm(final) if final is not None else None,
        (_hidden(final, last.leaving) if final is not None else last.leaving).site,
        tuple(_long_skip(r, stack) for r in rejoins if _is_within(r, stack)),
        read_by="norm" if final is not None else reader_of(ends, graph.outputs),
    )


def _is_within(rejoin: Rejoin, stack: list[Group]) -> bool:
    """True where a rejoin is inside a stack or directly after it."""
    sums = {s for group in stack for s in group.sums}
    return not sums.isdisjoint(nearest(rejoin.later.value))


def _long_skip(rejoin: Rejoin, stack: list[Group]) -> LongSkip:
    total, later = rejoin.total.value, rejoin.later
    reader = [group for group in stack if total in came_from(group.sums[0].skip)]
    return LongSkip(
        into=at_call(*reader[-1].holder) if reader else "",
        source=rejoin.earlier[0].site,
        sum=total.site,
        stream_scale=combine([(*later.factors, *factored(later.value)[1])]),
        skip_scale=combine(rejoin.total.stream_factors),
    )


def _hidden(final: FoundNorm, leaving: Value) -> Value:
    """The value after the final norm; where that norm is on a second stream, the sum with the first."""
    joined = (v for v in final.output.successors if v.base == "add" and leaving in v.inputs)
    return next(joined, final.output)


def _block(group: Group) -> Block:
    return Block(
        *group.holder,
        tuple(_branch(group, branch) for s in group.sums for branch in s.branches),
        entry=group.sums[0].entry.site,
        exit=group.sums[-1].leaving.site,
    )


def _branch(group: Group, branch: FoundBranch) -> Branch:
    path, call = _path(group, branch)
    return Branch(
        kind=_kind(branch),
        placement=branch.placement,
        norm=branch.norms[0].kind if branch.norms else "none",
        path=path,
        call=call,
        join=branch.join,
        stream_scale=branch.stream_scale,
        branch_scale=branch.branch_scale,
        scheme=branch.scheme,
        entry=_entry(branch).site,
        output=branch.output.site,
        sum=branch.sum.value.site,
        norms=tuple(_norm(norm) for norm in branch.norms),
        fused=branch.fused,
        projections=read_projections(branch),
        attention=tuple(
            AttentionSites(*(v.site for v in (a.query, a.key, a.value, a.logits, a.probabilities)))
            for a in branch.attentions
        ),
    )


def _entry(branch: FoundBranch) -> Value:
    """The stream as the branch reads it; with several streams, the value that the branch reads of them."""
    total = branch.sum
    if total.several == "beside" and branch.normed:
        return branch.norms_in[0].input
    return total.entry if total.read is None else total.read


def _kind(branch: FoundBranch) -> Kind:
    """Kind of the branch. Keys from an earlier, longer state of the stream (Funnel) are self-attention."""
    before = link(branch.sum).before
    if branch.kind != "cross-attention" or before is None:
        return branch.kind
    same = all(before in nearest(a.key) for a in branch.attentions)
    return "attention" if same else "cross-attention"


def _path(group: Group, branch: FoundBranch) -> tuple[str, int]:
    """The innermost module that holds the branch's matmuls; where that is the block, the last matmul's."""
    paths, (block, nth) = owners(branch), group.holder
    if not paths:
        return branch.mixers[-1].call.path, branch.mixers[-1].call.nth
    path = common_path(paths)
    if path == block or not path.startswith(block):
        path = paths[-1]
    calls = {call.path: call.nth for op in branch.mixers for call in op.call.around()}
    return path, calls.get(path, nth)


def _norm(norm: FoundNorm) -> Norm:
    weight = norm.weight.name if norm.weight is not None else None
    path, ends = norm.core.call.path, (norm.input.site, norm.output.site)
    return Norm(norm.kind, path, *ends, norm.eps, weight, norm.weight_offset)
