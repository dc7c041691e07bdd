"""Schemes that keep several streams, each fed by the same branches.

A branch's output that is a term of two sums feeds two streams (ResiDual, SiameseNorm): the sums of the one
that the next branch reads are kept, those of the other noted beside them. A branch's output that is spread
over an axis of the state by weights, and added to the state mixed along that axis, feeds all of a state's
streams at once (Hyper-Connections, mHC):

    H ← A_rᵀH + B⊗F(z), z = A_mᵀH      H (B, T, n, D), z and F(z) (B, T, D)

There the skip is H, and z, the one value that everything in F comes from, is what the branch reads.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from normscope.anatomy.graph import Graph, Op, Value, ancestors, between, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import PARTS, SAME, matmul_operands, mixes_between
from normscope.anatomy.residual import Several, Sum
from normscope.anatomy.streams import link
from normscope.anatomy.terms import Term, core, direct_terms, scale_step

_NORMALISERS = frozenset({"_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp", "sum"})


def mixed_sums(graph: Graph) -> list[Sum]:
    """The sums of a state of several streams, in the order they ran."""
    found = (_mixed(op) for op in graph.ops if op.outputs and len(op.outputs[0].shape) > 2)
    return [total for total in found if total is not None]


def _mixed(op: Op) -> Sum | None:
    terms = direct_terms(op)
    if len(terms) != 2:
        return None
    for kept, written in (terms, terms[::-1]):
        branch = _spread(written.value)
        state = _state(kept.value, op.outputs[0]) if branch is not None else None
        if branch is None or state is None:
            continue
        read = _read(state[0], branch)
        if read is not None:
            kind: Several = "stochastic" if _is_stochastic(state[1], state[0]) else "mixed"
            return Sum(
                value=op.outputs[0],
                op=op,
                skip=state[0],
                stream_factors=[("learnt",)],
                branches=[Term(written.value, ("learnt",), fused=written.fused)],
                entry=state[0],
                read=read,
                spread=branch,
                several=kind,
            )
    return None


def _spread(value: Value) -> Value | None:
    """f of B⊗f, a product that repeats f along an axis other than the features'; None for anything else."""
    value = value.behind(SAME)
    if value.op is None or not value.live:
        return None
    operands = value.op.inputs if value.base == "mul" else matmul_operands(value.op) or ()
    if len(operands) != 2 or not all(v.live or v.learnt for v in operands):
        return None
    if value.base != "mul" and operands[0].shape[-1] != 1:  # a product of (n, 1) and (1, D)
        return None
    rank = len(value.shape) - 1
    for factor, other in (operands, operands[::-1]):
        repeated = factor.shape[-2:-1] == (1,) and other.shape[-1:] == (1,) and rank == len(factor.shape) - 1
        if value.base != "mul":
            repeated = factor is operands[1]
        while factor.base in SAME and len(factor.shape) > rank:
            factor = factor.source
        if repeated and factor.live and factor.learnt and math.prod(factor.shape) < math.prod(value.shape):
            return factor
    return None


def _state(value: Value, like: Value) -> tuple[Value, Value] | None:
    """H of A_rᵀH, in the shape of the sum, and A_r; None where `value` is no such product."""
    mixing: Value | None = None
    while value.op is not None:
        operands = matmul_operands(value.op)
        if mixing is not None and value.shape == like.shape:
            return value, mixing
        if value.base in SAME | PARTS:
            value = value.source
        elif operands is not None and mixing is None:
            carriers = [v for v in operands if math.prod(v.shape) == math.prod(like.shape) and v.live]
            if len(carriers) != 1:
                return None
            mixing = next(v for v in operands if v is not carriers[0])
            value = carriers[0]
        else:
            return None
    return None


def _read(state: Value, branch: Value) -> Value | None:
    """The first value in the shape of the branch's output that all ways from the state to it pass."""
    if not mixes_between(state, branch):
        return None
    region = between(state, branch)
    place = {v: number for number, v in enumerate([state, *region])}
    passing = [0] * (len(place) + 1)
    for v in region:
        for source in v.op.inputs if v.op is not None else ():
            if source in place:
                passing[place[source] + 1] += 1
                passing[place[v]] -= 1
    ways = 0
    for v, number in place.items():
        ways += passing[number]
        if ways == 0 and v.shape == branch.shape and v is not branch:
            return v
    return None


def _is_stochastic(mixing: Value, state: Value) -> bool:
    """Whether the mixing matrix is normed over and over (Sinkhorn's steps)."""
    return sum(v.base in _NORMALISERS for v in ancestors([mixing], state.index)) > 2


def shared_terms(graph: Graph) -> set[Value]:
    """Branches' outputs that are terms of several sums: read in none of them by another term."""
    adds: dict[Value, list[tuple[Op, Value]]] = defaultdict(list)
    by_op = {op: direct_terms(op) for op in graph.ops if op.outputs}
    within = {term.add for terms in by_op.values() for term in terms}  # b − a of a + z·(b − a)
    for op in (op for op in by_op if op not in within):
        terms = [core(term.value) for term in by_op[op]]
        if len(terms) == 2 and all(v.live and v.learnt for v in terms):
            adds[terms[0]].append((op, terms[1]))
            adds[terms[1]].append((op, terms[0]))
    return {
        v
        for v, others in adds.items()
        if len(others) > 1 and not any(mixes_between(v, other) for _, other in others)
    }


def one_stream(sums: list[Sum], shared: set[Value], norms: dict[Value, FoundNorm]) -> list[Sum]:
    """`sums` without those that feed a second stream; the kept ones know what was added beside them."""
    by_value = {s.value: s for s in sums}
    chain: dict[Sum, Sum] = {}
    normed: dict[Sum, int] = defaultdict(int)
    length: dict[Sum, int] = defaultdict(int)
    fed: dict[Value, list[Sum]] = defaultdict(list)
    for s in sums:
        before = link(s, by_value, norms)
        first = chain.get(before.before, s) if before.before is not None and before.direct else s
        chain[s] = first
        length[first] += 1
        normed[first] += bool(before.norms)
        for term in s.branches:
            if core(term.value) in shared:
                fed[core(term.value)].append(s)
    dropped: set[Sum] = set()
    for branch, members in fed.items():
        kept = max(members, key=lambda s: (length[chain[s]], normed[chain[s]]))
        kept.beside = _beside(branch, kept)
        kept.several = "beside"
        dropped.update(s for s in members if s is not kept)
    return [s for s in sums if s not in dropped]


def _beside(branch: Value, kept: Sum) -> list[Value]:
    """What else the branch is added to make."""

    def step(value: Value) -> Iterable[Value]:
        outputs = (out for op in value.users for out in op.outputs)
        return (out for out in outputs if out.base in SAME or scale_step(out) is not None)

    users = (op for value in search([branch], step) for op in value.users if op is not kept.op)
    return [out for op in users if len(direct_terms(op)) == 2 for out in op.outputs]
