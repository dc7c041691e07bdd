"""Schemes that keep several streams, each fed by the same branches.

A branch whose output is a term of two sums feeds two streams (ResiDual, SiameseNorm): the sums of the stream
that the next branch reads are kept, the others are recorded with them (`beside`). In Hyper-Connections and
mHC, the output is spread over an axis of the state by weights and added to the state mixed along that axis,
so it feeds all streams at once:

    H ← A_rᵀH + B⊗F(z), z = A_mᵀH      H (B, T, n, D), z and F(z) (B, T, D)

The origin of A_r gives the kind: repeated normalisations (mHC), one softmax over n! entries (mHC-lite), or
over the two entries of each 2 × 2 factor (KromHC).

There the skip is H, and the branch reads z, the one value that everything in F comes from.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from normscope.anatomy.graph import Graph, Op, Value, ancestors, between, search
from normscope.anatomy.ops import PARTS, SAME, matmul_operands, mixes_between, op_set
from normscope.anatomy.residual import Several, Sum, without
from normscope.anatomy.streams import link
from normscope.anatomy.terms import Term, core, direct_terms, scale_step

_SOFTMAX = op_set("_softmax softmax")
_NORMALISERS = op_set("_softmax _log_softmax softmax log_softmax logsumexp sum")


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
            return Sum(
                value=op.outputs[0],
                op=op,
                skip=state[0],
                stream_factors=[("learnt",)],
                terms=[Term(written.value, ("learnt",), fused=written.fused)],
                entry=state[0],
                read=read,
                spread=branch,
                several=_mixing_kind(state[1], state[0]),
            )
    return None


def _spread(value: Value) -> Value | None:
    """f of B⊗f, a product that repeats f along an axis other than the features'; None for anything else."""
    value = value.behind(SAME)
    if not value.live:
        return None
    is_product = value.base == "mul"
    operands = value.inputs if is_product else matmul_operands(value.op) or ()
    if len(operands) != 2 or not all(v.live or v.learnt for v in operands):
        return None
    if not is_product and operands[0].shape[-1] != 1:  # a product of (n, 1) and (1, D)
        return None
    rank = len(value.shape) - 1
    for factor, other in (operands, operands[::-1]):
        repeated = factor.shape[-2:-1] == (1,) and other.shape[-1:] == (1,) and rank == len(factor.shape) - 1
        if not is_product:
            repeated = factor is operands[1]
        while factor.base in SAME and len(factor.shape) > rank:
            factor = factor.source
        if repeated and factor.live and factor.learnt and factor.numel < value.numel:
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
            carriers = [v for v in operands if v.numel == like.numel and v.live]
            if len(carriers) != 1:
                return None
            mixing = next(v for v in operands if v is not carriers[0])
            value = carriers[0]
        else:
            return None
    return None


def _read(state: Value, branch: Value) -> Value | None:
    """The first value with the shape of the branch's output on all paths from the state to it."""
    if not mixes_between(state, branch):
        return None
    region = between(state, branch)
    numbers = {v: number for number, v in enumerate([state, *region])}
    passing = [0] * (len(numbers) + 1)
    for v in region:
        for source in v.inputs:
            if source in numbers:
                passing[numbers[source] + 1] += 1
                passing[numbers[v]] -= 1
    ways = 0
    for v, number in numbers.items():
        ways += passing[number]
        if ways == 0 and v.shape == branch.shape and v is not branch:
            return v
    return None


def _mixing_kind(mixing: Value, state: Value) -> Several:
    """The kind of several streams, by the origin of the mixing matrix (…, n, n)."""
    normalised = [v for v in ancestors([mixing], state.index) if v.base in _NORMALISERS]
    if len(normalised) > 2:
        return "stochastic"
    shares = [v.shape for v in normalised if v.base in _SOFTMAX]
    num_streams = mixing.shape[-1]
    if len(shares) == 1 and shares[0][-1] == math.factorial(num_streams):
        return "permuted"
    if len(shares) == 1 and shares[0][-1] == 2 and num_streams == 2 ** shares[0][-2]:
        return "kronecker"
    return "mixed"


def shared_terms(graph: Graph) -> set[Value]:
    """Branch outputs that are terms of several sums, and that no other term of these sums reads."""
    added: dict[Value, list[Value]] = defaultdict(list)
    by_op = {op: direct_terms(op) for op in graph.ops}
    within = {term.add for terms in by_op.values() for term in terms}  # b − a of a + z·(b − a)
    for op, terms in by_op.items():
        if op not in within and len(terms) == 2:
            a, b = (core(term.value) for term in terms)
            if all(v.live and v.learnt for v in (a, b)):
                added[a].append(b)
                added[b].append(a)
    return {
        v
        for v, others in added.items()
        if len(others) > 1 and not any(mixes_between(v, other) for other in others)
    }


def one_stream(sums: list[Sum], shared: set[Value]) -> list[Sum]:
    """`sums` without those of a second stream; the kept ones record what was added beside them."""
    chain: dict[Sum, Sum] = {}
    normed: dict[Sum, int] = defaultdict(int)
    length: dict[Sum, int] = defaultdict(int)
    fed: dict[Value, list[Sum]] = defaultdict(list)
    for s in sums:
        before = link(s)
        first = chain.get(before.before, s) if before.before is not None and before.direct else s
        chain[s] = first
        length[first] += 1
        normed[first] += bool(before.norms)
        for value in (core(term.value) for term in s.terms):
            if value in shared:
                fed[value].append(s)
    dropped: set[Sum] = set()
    for branch, members in fed.items():
        kept = max(members, key=lambda s: (length[chain[s]], normed[chain[s]]))
        kept.beside = _beside(branch, kept)
        kept.several = "beside"
        dropped.update(s for s in members if s is not kept)
    return without(sums, dropped)


def _beside(branch: Value, kept: Sum) -> list[Value]:
    """The other sums that the branch is a term of."""

    def step(value: Value) -> Iterable[Value]:
        return (v for v in value.successors if v.base in SAME or scale_step(v) is not None)

    users = (op for value in search([branch], step) for op in value.users if op is not kept.op)
    return [out for op in users if len(direct_terms(op)) == 2 for out in op.outputs]
