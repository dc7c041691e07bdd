"""Find the residual sums: adds one of whose terms is an ancestor of another by way of something learnt.

One term of the sum (`terms`), seen through views, casts, dropout, scales, gates and (last) norms, must be
read by another term *with a parameterised matmul, convolution, FFT or scan on the way*. That rules out rotary
embeddings, GELU's tanh form, masks and position adds, where nothing learnt lies between.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Literal

from normscope.anatomy.attention import Attention, logits_of
from normscope.anatomy.graph import Graph, Op, Value, ancestors, between, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME, VIEWS, is_weight, mixes_between, weight_of
from normscope.anatomy.terms import Factor, Term, direct_terms, scale_step, step_weight, terms_of

Several = Literal["", "beside", "mixed", "stochastic"]
"""One stream; a second beside it; a state of streams that mix, the last by doubly stochastic matrices."""


@dataclass(eq=False)
class Sum:
    """A residual sum: `value` = stream factors · `skip` + branches.

    Attributes:
        skip: the stream as the branches read it.
        entry: the same in the shape of the sum, where the skip was found as a flattened view of it.
        skip_norm: a norm that the skip passes and the branches do not (nGPT).
        long_skips: further terms that the branches come from (B2T, dense connections).
        shrunk: whether a learnt share of the sum is taken away right behind it (GPAS).
        several: how its streams are kept where there are several, "" for one; see `several`.
        read, spread: what the branch reads of such a state, and its output before it is spread over it.
        beside: what else the branch's output is added to make.
    """

    value: Value
    op: Op
    skip: Value
    stream_factors: list[tuple[Factor, ...]]
    branches: list[Term]
    entry: Value
    skip_norm: FoundNorm | None = None
    long_skips: list[Value] = field(default_factory=list)
    shrunk: bool = False
    several: Several = ""
    read: Value | None = None
    spread: Value | None = None
    beside: list[Value] = field(default_factory=list)

    @property
    def doubled(self) -> bool:
        """Whether more than one term is the skip, or another point that the branches come from."""
        return len(self.stream_factors) + len(self.long_skips) > 1

    @property
    def start(self) -> Value:
        """Where the branches start: the skip, or what is read of several streams."""
        return self.skip if self.read is None else self.read

    def region(self, term: Term) -> list[Value]:
        """What lies between the start and a branch's end."""
        return between(self.start, term.value if self.spread is None else self.spread)


@dataclass
class _Candidate:
    """A value that a term may be the skip of, with the factors between them."""

    value: Value
    factors: tuple[Factor, ...]
    norm: FoundNorm | None


def find_sums(
    graph: Graph,
    norms: dict[Value, FoundNorm],
    attentions: list[Attention],
    known: Set[Op] = frozenset(),
) -> list[Sum]:
    """All residual sums, in the order they ran, but for the `known` adds."""
    logits = logits_of(graph.ops)
    operands = {v for a in attentions for v in (a.query, a.key, a.value)}
    taken: set[Op] = set(known)
    sums: list[Sum] = []
    for op in reversed(graph.ops):
        if op in taken or not op.outputs or not op.outputs[0].floating or not op.outputs[0].learnt:
            continue
        if op.outputs[0] in logits or _is_read_by_attention_alone(op.outputs[0], operands):
            continue
        tree = Term(op.outputs[0], (), terms_of(op))
        if not tree.inner:
            continue
        found = _as_sum(op, tree, norms)
        if found is not None and found.doubled and any(add.call is not op.call for add in _adds(tree)):
            # What another module summed, and an earlier point of the stream on top: that is a sum of its own.
            tree = Term(op.outputs[0], (), terms_of(op, op.call))
            found = _as_sum(op, tree, norms)
        if found is not None:
            sums.append(found)
            taken.update(_adds(tree))
    return [_with_scale_behind(_with_share_taken(s)) for s in reversed(sums)]


def _is_read_by_attention_alone(value: Value, operands: set[Value]) -> bool:
    """Whether a value ends in the operands of attentions, with no learnt map between: values mixed with those
    of the first layer are no stream.
    """

    def step(here: Value) -> Iterator[Value]:
        if _is_mapped(here):
            return iter(())
        through = [op for op in here.users if here not in operands or op.base in VIEWS]
        return (v for op in through for v in op.outputs)

    if not operands or not value.users:
        return False
    ends = [v for v in search([value], step) if v in operands or not v.users or _is_mapped(v)]
    return all(v in operands and not _is_mapped(v) for v in ends)


def _is_mapped(value: Value) -> bool:
    return any(weight_of(op) is not None for op in value.users)


def _with_share_taken(total: Sum) -> Sum:
    """s − c·s with s = x + F(x) and a learnt c, where nothing else reads s, is (1 − c)·x + (1 − c)·F(x)."""
    users = [op for op in total.value.users if op.outputs]
    ends = [op.outputs[0] for op in users if op.base == "sub"]
    if len(users) == 2 and len(ends) == 1 and scale_step(ends[0]) == (total.value, "learnt"):
        _scale_all(total, ends[0], "learnt")
        total.shrunk = True
    return total


def _scale_all(total: Sum, scaled: Value, factor: Factor) -> None:
    """Make `scaled`, the sum times a factor, the sum."""
    weight = step_weight(scaled, (total.value, factor))
    total.value = scaled
    total.stream_factors = [(*f, factor) for f in total.stream_factors]
    for term in total.branches:
        for each in (term, *(term.leaves() if term.inner else ())):
            each.factors, each.fused = (*each.factors, factor), (*each.fused, weight)


def _with_scale_behind(total: Sum) -> Sum:
    """(x + F(x))·c, where nothing reads the bare sum, is c·x + c·F(x)."""
    users = total.value.users
    while len(users) == 1 and users[0].call is total.op.call and users[0].outputs:
        scaled = scale_step(users[0].outputs[0])
        if scaled is None or scaled[0] is not total.value or isinstance(scaled[1], str) or scaled[1] == 1:
            break
        _scale_all(total, users[0].outputs[0], scaled[1])
        users = total.value.users
    return total


def _adds(tree: Term) -> Iterator[Op]:
    for term in tree.inner:
        if term.add is not None:
            yield term.add
        yield from _adds(term)


def _candidates(value: Value, norms: dict[Value, FoundNorm]) -> list[_Candidate]:
    """The term itself, then what it is of, nearest first."""
    found: list[_Candidate] = []
    queue = [_Candidate(value, (), None)]
    while queue and len(found) < 16:
        here = queue.pop(0)
        found.append(here)
        op, norm = here.value.op, norms.get(here.value)
        if norm is not None:
            if here.norm is None:
                queue.append(_Candidate(norm.input, here.factors, norm))
        elif op is None:
            continue
        elif op.base in SAME:
            queue.append(_Candidate(op.inputs[0], here.factors, here.norm))
        elif (scaled := scale_step(here.value)) is not None:
            carriers = [v for v in op.inputs if v.live] if scaled[1] == "gate" else [scaled[0]]
            queue += [_Candidate(v, (*here.factors, scaled[1]), here.norm) for v in carriers]
    return found


def _as_sum(op: Op, tree: Term, norms: dict[Value, FoundNorm]) -> Sum | None:
    leaves = tree.leaves()
    chains = [_candidates(leaf.value, norms) for leaf in leaves]
    lowest = min(c.value.index for chain in chains for c in chain)
    behind = [ancestors([leaf.value], lowest - 1) for leaf in leaves]
    skips: list[tuple[int, _Candidate]] = []
    for i, chain in enumerate(chains):
        candidates = (
            c
            for c in chain
            if any(i != j and _reads(c.value, leaves[j], behind[j]) for j in range(len(leaves)))
        )
        read = next(candidates, None)
        if read is not None:
            gated = "gate" in (*leaves[i].factors, *read.factors)
            skips.append((i, _before_views(read, candidates) if gated else read))
    if not skips:
        return None
    skip = max((c for _, c in skips), key=lambda c: c.value.index)
    same = [(i, c) for i, c in skips if c.value is skip.value]
    inner = _inner_sum(
        tree,
        skip.value,
        norms,
        {id(leaves[i]) for i, _ in same},
        {id(leaves[i]) for i, c in skips if c.value is not skip.value},
    )
    if inner is not None:
        inner.inner, inner.add = [], None
        return _as_sum(op, tree, norms)
    branches = _branches(tree, {id(leaves[i]) for i, _ in skips})
    if not branches:
        return None
    return Sum(
        value=tree.value,
        op=op,
        skip=skip.value,
        stream_factors=[(*leaves[i].factors, *c.factors) for i, c in same],
        branches=branches,
        entry=_shaped(skip.value, tree.value.shape),
        skip_norm=skip.norm,
        long_skips=[c.value for _, c in skips if c.value is not skip.value],
    )


def _before_views(read: _Candidate, more: Iterator[_Candidate]) -> _Candidate:
    """The last candidate that `read` is a view of: a gate reads a view of what the branch reads."""
    views = set(search([read.value], lambda v: (v.source,) if v.base in SAME else ()))
    return [read, *(candidate for candidate in more if candidate.value in views)][-1]


def _shaped(value: Value, shape: tuple[int, ...]) -> Value:
    """`value`, or a view of it in this shape: a linear layer's output is a flattened matrix first."""
    if value.shape == shape:
        return value
    views = (v for op in value.users if op.base in VIEWS for v in op.outputs)
    return next((v for v in views if v.shape == shape), value)


def _is_stream_point(value: Value, norms: dict[Value, FoundNorm]) -> bool:
    while value in norms or value.base in SAME:
        value = norms[value].input if value in norms else value.source
    return value.op is not None and len(direct_terms(value.op)) > 1 and not is_weight(value.op.inputs[-1])


def _inner_sum(
    tree: Term, skip: Value, norms: dict[Value, FoundNorm], skips: set[int], others: set[int]
) -> Term | None:
    """A smaller subtree with a skip of its own: a residual inside a branch, x + (a + F(a)).

    Not so where a is a point of the stream, a sum or its norm (B2T).
    """
    if _is_stream_point(skip, norms):
        return None
    for term in tree.inner:
        leaves = {id(leaf) for leaf in term.leaves()}
        if term.inner and others and skips < leaves and not others & leaves:
            return term
    return None


def _reads(start: Value, term: Term, behind: set[Value]) -> bool:
    """Whether `term` comes from `start` by way of something learnt."""
    return start in behind and start is not term.value and mixes_between(start, term.value)


def _branches(tree: Term, skips: set[int]) -> list[Term]:
    """The largest subtrees without a skip in them."""
    if id(tree) in skips:
        return []
    if not any(id(leaf) in skips for leaf in tree.leaves()):
        return [tree]
    return [branch for term in tree.inner for branch in _branches(term, skips)]
