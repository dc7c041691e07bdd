"""Find the residual sums: adds with a term that is an ancestor of another term through a learnt op.

One term of the sum (`terms`), seen through views, casts, dropout, scales, gates and (last) norms, must be
read by another term *through a parameterised matmul, convolution, FFT or scan*. That excludes rotary
embeddings, GELU's tanh form, masks and position adds, which have no learnt op between.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from normscope.anatomy.attention import Attention, logits_of
from normscope.anatomy.graph import Graph, Op, Value, ancestors, between, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME, VIEWS, mixes_between, weight_of
from normscope.anatomy.terms import Factor, Term, direct_terms, scale_step, step_weight, terms_of

if TYPE_CHECKING:
    from normscope.anatomy.branches import FoundBranch

Several = Literal["", "beside", "mixed", "stochastic", "permuted", "kronecker"]
"""One stream; two streams side by side; a state of mixed streams; mixed by doubly stochastic matrices, from
Sinkhorn's steps, from permutations, or from Kronecker products."""


@dataclass(eq=False)
class Sum:
    """A residual sum: `value` = stream factors · `skip` + terms.

    Attributes:
        skip: the stream as the branches read it.
        entry: the skip in the shape of the sum, where it was found as a flattened view.
        terms: the terms that are branches.
        skip_norm: a norm that the skip passes and the branches do not (nGPT).
        long_skips: further terms that the branches come from (B2T, dense connections).
        shrunk: whether a learnt share of the sum is subtracted directly after it (GPAS).
        several: kind of several streams, "" for one; see `several`.
        read, spread: value that the branch reads of several streams, and its output before it is spread.
        beside: other sums that the branch's output is a term of.
        branches, norms_behind: found later: the branches, and the norms on the stream after the sum.
    """

    value: Value
    op: Op
    skip: Value
    stream_factors: list[tuple[Factor, ...]]
    terms: list[Term]
    entry: Value
    skip_norm: FoundNorm | None = None
    long_skips: list[Value] = field(default_factory=list)
    shrunk: bool = False
    several: Several = ""
    read: Value | None = None
    spread: Value | None = None
    beside: list[Value] = field(default_factory=list)
    branches: list["FoundBranch"] = field(default_factory=list)
    norms_behind: list[FoundNorm] = field(default_factory=list)

    @property
    def start(self) -> Value:
        """The value where the branches start: the skip, or the value read of several streams."""
        return self.skip if self.read is None else self.read

    @property
    def leaving(self) -> Value:
        """The stream after the sum and its norms."""
        return self.norms_behind[-1].output if self.norms_behind else self.value

    def is_inside(self, outer: "Sum") -> bool:
        """True for N(x) + F(x) in a branch that is added to x itself (RepMixer): a detail of that branch."""
        return self.skip is outer.skip and self.skip_norm is not None and () in outer.stream_factors

    def region(self, term: Term) -> list[Value]:
        """All values between the start and a branch's end."""
        return between(self.start, term.value if self.spread is None else self.spread)


@dataclass
class _Candidate:
    """A value that may be the skip behind a term, with the factors between them."""

    value: Value
    factors: tuple[Factor, ...]
    norm: FoundNorm | None


def find_sums(graph: Graph, attentions: list[Attention], known: Set[Op] = frozenset()) -> list[Sum]:
    """All residual sums, in the order they ran, except the `known` adds."""
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
        found = _as_sum(op, tree)
        is_doubled = found is not None and len(found.stream_factors) + len(found.long_skips) > 1
        if is_doubled and any(add.call is not op.call for add in _adds(tree)):
            # Another module's sum plus an earlier point of the stream is a sum of its own.
            tree = Term(op.outputs[0], (), terms_of(op, op.call))
            found = _as_sum(op, tree)
        if found is not None:
            sums.append(found)
            taken.update(_adds(tree))
    return [_with_scale_behind(_with_share_taken(s)) for s in reversed(sums)]


def without(sums: list[Sum], dropped: Set[Sum]) -> list[Sum]:
    """`sums` without the `dropped` ones, whose values no longer refer to them."""
    for total in dropped:
        total.value.sum = None
    return [total for total in sums if total not in dropped]


def _is_read_by_attention_alone(value: Value, operands: set[Value]) -> bool:
    """True where a value reaches only operands of attentions, with no learnt map between.

    Such values, mixed with those of the first layer, are not the stream.
    """

    def step(here: Value) -> Iterator[Value]:
        is_operand = here in operands
        after = here.successors if not _is_mapped(here) else ()
        return (v for v in after if not is_operand or v.base in VIEWS)

    if not operands or not value.users:
        return False
    ends = (v for v in search([value], step) if v in operands or not v.users or _is_mapped(v))
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
    for term in total.terms:
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


def _candidates(value: Value) -> list[_Candidate]:
    """The term itself, then what it was before norms, views and scales, nearest first."""
    found: list[_Candidate] = []
    queue = [_Candidate(value, (), None)]
    while queue and len(found) < 16:
        here = queue.pop(0)
        found.append(here)
        norm, inputs = here.value.norm, here.value.inputs
        if norm is not None:
            if here.norm is None:
                queue.append(_Candidate(norm.input, here.factors, norm))
        elif here.value.base in SAME:
            queue.append(_Candidate(inputs[0], here.factors, here.norm))
        elif (scaled := scale_step(here.value)) is not None:
            carriers = [v for v in inputs if v.live] if scaled[1] == "gate" else [scaled[0]]
            queue += [_Candidate(v, (*here.factors, scaled[1]), here.norm) for v in carriers]
        elif (unshifted := _without_shift(here.value)) is not None:
            queue.append(_Candidate(unshifted, here.factors, here.norm))
    return found


def _without_shift(value: Value) -> Value | None:
    """x of x + b with a learnt b for each feature; None for anything else."""
    if value.base != "add" or len(value.inputs) != 2:
        return None
    x, shift = value.inputs if value.inputs[1].is_weight else value.inputs[::-1]
    return x if shift.is_weight and x.live and shift.shape[-1:] == x.shape[-1:] == (shift.numel,) else None


def _as_sum(op: Op, tree: Term) -> Sum | None:
    leaves = tree.leaves()
    chains = [_candidates(leaf.value) for leaf in leaves]
    lowest = min(c.value.index for chain in chains for c in chain)
    behind = [ancestors([leaf.value], lowest - 1) for leaf in leaves]
    skips: list[tuple[Term, _Candidate]] = []
    for leaf, chain in zip(leaves, chains, strict=True):
        others = [(other, b) for other, b in zip(leaves, behind, strict=True) if other is not leaf]
        candidates = (c for c in chain if any(_reads(c.value, other, b) for other, b in others))
        read = next(candidates, None)
        if read is not None:
            gated = "gate" in (*leaf.factors, *read.factors)
            skips.append((leaf, _before_views(read, candidates) if gated else read))
    if not skips:
        return None
    skip = max((c for _, c in skips), key=lambda c: c.value.index)
    same = [(leaf, c) for leaf, c in skips if c.value is skip.value]
    long = [(leaf, c) for leaf, c in skips if c.value is not skip.value]
    inner = _inner_sum(tree, skip.value, [leaf for leaf, _ in same], [leaf for leaf, _ in long])
    if inner is not None:
        inner.inner, inner.add = [], None
        return _as_sum(op, tree)
    terms = _branch_terms(tree, [leaf for leaf, _ in skips])
    if not terms:
        return None
    return Sum(
        value=tree.value,
        op=op,
        skip=skip.value,
        stream_factors=[(*leaf.factors, *c.factors) for leaf, c in same],
        terms=terms,
        entry=_shaped(skip.value, tree.value.shape),
        skip_norm=skip.norm,
        long_skips=[c.value for _, c in long],
    )


def _before_views(read: _Candidate, more: Iterator[_Candidate]) -> _Candidate:
    """The last candidate that `read` is a view of: a gate reads a view of the branch's input."""
    views = set(read.value.through(SAME))
    return [read, *(candidate for candidate in more if candidate.value in views)][-1]


def _shaped(value: Value, shape: tuple[int, ...]) -> Value:
    """`value`, or a view of it in this shape: a linear layer's output is a flattened matrix first."""
    if value.shape == shape:
        return value
    return next((v for v in value.successors if v.base in VIEWS and v.shape == shape), value)


def _is_stream_point(value: Value) -> bool:
    while value.norm is not None or value.base in SAME:
        value = value.norm.input if value.norm is not None else value.source
    return len(direct_terms(value.op)) > 1 and not value.inputs[-1].is_weight


def _inner_sum(tree: Term, skip: Value, skips: list[Term], others: list[Term]) -> Term | None:
    """A smaller subtree with a skip of its own: a residual inside a branch, x + (a + F(a)).

    None where a is a point of the stream, a sum or its norm (B2T).
    """
    if _is_stream_point(skip) or not others:
        return None
    for term in tree.inner:
        leaves = set(term.leaves())
        if term.inner and set(skips) < leaves and leaves.isdisjoint(others):
            return term
    return None


def _reads(start: Value, term: Term, behind: set[Value]) -> bool:
    """True where `term` comes from `start` through a learnt op."""
    return start in behind and start is not term.value and mixes_between(start, term.value)


def _branch_terms(tree: Term, skips: list[Term]) -> list[Term]:
    """The largest subtrees without a skip in them."""
    if tree in skips:
        return []
    if not any(leaf in skips for leaf in tree.leaves()):
        return [tree]
    return [branch for term in tree.inner for branch in _branch_terms(term, skips)]
