"""Find the residual sums: adds one of whose terms is an ancestor of another by way of something learnt.

Sums are taken apart into terms with factors: add, add(alpha), sub, lerp, stack + sum, an n-ary chain of adds
that nothing else reads, and scales in front of such a chain. One term, seen through views, casts, dropout,
scales, gates and (last) norms, must be read by another term *with a parameterised matmul, convolution, FFT or
scan on the way*. That rules out rotary embeddings, GELU's tanh form, masks and position adds, where nothing
learnt lies between.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from normscope.anatomy.attention import logits_of
from normscope.anatomy.graph import Graph, Op, Value, ancestors, between
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME, VIEWS, is_mixing, is_weight

Factor = float | str
"""A number, "learnt" or "gate"."""


@dataclass(eq=False)
class Term:
    """One term of a sum: a value times factors; `inner` are the terms it is itself the plain sum of."""

    value: Value
    factors: tuple[Factor, ...] = ()
    inner: list["Term"] = field(default_factory=list)
    add: Op | None = None

    def leaves(self) -> list["Term"]:
        """The terms at the bottom."""
        return [leaf for term in self.inner for leaf in term.leaves()] if self.inner else [self]


@dataclass(eq=False)
class Sum:
    """A residual sum: `value` = stream factors · `skip` + branches.

    Attributes:
        skip: the stream as the branches read it.
        entry: the same in the shape of the sum, where the skip was found as a flattened view of it.
        skip_norm: a norm that the skip passes and the branches do not (nGPT).
        long_skips: further terms that the branches come from (B2T, dense connections).
    """

    value: Value
    op: Op
    skip: Value
    stream_factors: list[tuple[Factor, ...]]
    branches: list[Term]
    entry: Value
    skip_norm: FoundNorm | None = None
    long_skips: list[Value] = field(default_factory=list)

    @property
    def doubled(self) -> bool:
        """Whether more than one term is the skip, or another point that the branches come from."""
        return len(self.stream_factors) + len(self.long_skips) > 1

    def region(self, term: Term) -> list[Value]:
        """What lies between the skip and a branch's end."""
        return between(self.skip, term.value)


@dataclass
class _Candidate:
    """A value that a term may be the skip of, with the factors between them."""

    value: Value
    factors: tuple[Factor, ...]
    norm: FoundNorm | None


def find_sums(graph: Graph, norms: dict[Value, FoundNorm]) -> list[Sum]:
    """All residual sums, in the order they ran."""
    logits = logits_of(graph.ops)
    taken: set[Op] = set()
    sums: list[Sum] = []
    for op in reversed(graph.ops):
        if op in taken or not op.outputs or not op.outputs[0].floating or not op.outputs[0].learnt:
            continue
        if op.outputs[0] in logits:
            continue
        tree = Term(op.outputs[0], (), _terms(op))
        if not tree.inner:
            continue
        found = _as_sum(op, tree, norms)
        if found is not None and found.doubled and any(add.call is not op.call for add in _adds(tree)):
            # What another module summed, and an earlier point of the stream on top: that is a sum of its own.
            tree = Term(op.outputs[0], (), direct_terms(op))
            found = _as_sum(op, tree, norms)
        if found is not None:
            sums.append(found)
            taken.update(_adds(tree))
    return [_with_scale_behind(s) for s in reversed(sums)]


def _with_scale_behind(total: Sum) -> Sum:
    """(x + F(x))·c, where nothing reads the bare sum, is c·x + c·F(x)."""
    users = total.value.users
    while len(users) == 1 and users[0].call is total.op.call and users[0].outputs:
        scaled = scale_step(users[0].outputs[0])
        if scaled is None or scaled[0] is not total.value or isinstance(scaled[1], str) or scaled[1] == 1:
            break
        total.value = users[0].outputs[0]
        total.stream_factors = [(*f, scaled[1]) for f in total.stream_factors]
        for term in total.branches:
            term.factors = (*term.factors, scaled[1])
            for leaf in term.leaves() if term.inner else ():
                leaf.factors = (*leaf.factors, scaled[1])
        users = total.value.users
    return total


def _adds(tree: Term) -> Iterator[Op]:
    for term in tree.inner:
        if term.add is not None:
            yield term.add
        yield from _adds(term)


def direct_terms(op: Op) -> list[Term]:
    """The tensors an additive op adds, with their factors; empty for other ops and for biases."""
    terms: list[Term] = []
    if op.base in {"add", "sub", "rsub"} and len(op.inputs) == 2:
        a, b = op.inputs
        alpha = _number(op.kwargs.get("alpha", 1))
        if op.base == "rsub":
            a, b = b, a
        terms = [
            Term(a, _factors(_number(op.kwargs.get("beta", 1)))),
            Term(b, _factors(alpha if op.base == "add" else -alpha)),
        ]
    elif op.base == "lerp":
        weight = op.args[2]
        if isinstance(weight, Value) and weight.number is None:
            kind: Factor = "gate" if weight.live else "learnt"
            terms = [Term(op.inputs[0], (kind,)), Term(op.inputs[1], (kind,))]
        else:
            number = _number(weight.number if isinstance(weight, Value) else weight)
            terms = [Term(op.inputs[0], _factors(1 - number)), Term(op.inputs[1], _factors(number))]
    elif op.base == "sum" and op.source.base in {"stack", "cat"} and op.source.op is not None:
        terms = _stacked(op, op.source.op)
    shape = op.outputs[0].shape if op.outputs else ()
    if any(not t.value.floating or len(t.value.shape) != len(shape) for t in terms):
        return []
    return terms


def _stacked(op: Op, stack: Op) -> list[Term]:
    """The terms of stack(...).sum(dim) over the stacked axis."""
    dims, axis = op.arg(1, "dim", []), stack.arg(1, "dim", 0)
    rank = len(op.source.shape)
    if [d % rank for d in dims or []] != [axis % rank] or op.arg(2, "keepdim", False):
        return []
    values = stack.inputs
    if stack.base == "cat":
        if any(v.shape[axis] != 1 for v in values):
            return []
        values = tuple(v.source if v.base == "unsqueeze" else v for v in values)
    return [Term(v) for v in values]


def _terms(op: Op) -> list[Term]:
    """`direct_terms`, chains of adds that nothing else reads taken apart."""
    terms = direct_terms(op)
    for term in terms:
        _take_apart(term)
    return terms


def _take_apart(term: Term) -> None:
    value, factors = term.value, term.factors
    while value.op is not None and len(value.users) == 1:
        scaled = scale_step(value)
        if value.base in SAME and value.shape == value.source.shape:
            value = value.source
        elif scaled is not None and scaled[1] != "gate":
            value, factors = scaled[0], (*factors, scaled[1])
        else:
            break
    if value.op is None or len(value.users) != 1:
        return
    inner = direct_terms(value.op)
    if len(inner) < 2 or not all(t.value.live for t in inner):
        return
    term.inner, term.add = inner, value.op
    for each in inner:
        each.factors = (*each.factors, *factors)
        _take_apart(each)


def scale_step(value: Value) -> tuple[Value, Factor] | None:
    """(carrier, factor) of a product with a number, a parameter, or a gate; None for anything else.

    Of two activations the carrier is the one that is not squashed (sigmoid, softmax, tanh, 1 − gate).
    """
    op = value.op
    if op is None:
        return None
    if op.base == "neg":
        return op.inputs[0], -1.0
    if op.base not in {"mul", "div"}:
        return None
    if len(op.inputs) == 1:
        number = _number(op.args[1] if isinstance(op.args[0], Value) else op.args[0])
        return op.inputs[0], 1 / number if op.base == "div" and number else number
    a, b = op.inputs
    if (op.base == "mul" and (not a.live and b.live) and a.shape != value.shape) or (
        op.base == "mul" and not a.live and b.live and (is_weight(a) or a.number is not None)
    ):
        a, b = b, a
    if not b.live:
        if b.number is not None:
            return a, 1 / b.number if op.base == "div" and b.number else b.number
        return a, "learnt" if b.learnt else 1.0  # neither live nor learnt nor one number: a dropout mask
    if op.base == "div":
        return None
    for mask, carrier in ((a, b), (b, a)):
        if carrier.learnt and not mask.learnt and math.prod(mask.shape) < math.prod(carrier.shape):
            return carrier, 1.0  # made of the input alone: a padding mask
    return (b, "gate") if _is_gate(a) and not _is_gate(b) else (a, "gate")


def _is_gate(value: Value) -> bool:
    while value.base in SAME or value.base in {"rsub", "select", "slice", "split"}:
        value = value.op.inputs[-1]  # type: ignore[union-attr]
    return value.base in {"sigmoid", "_softmax", "softmax", "_safe_softmax", "hardsigmoid", "tanh"}


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
        for candidate in chain:
            if any(i != j and _reads(candidate.value, leaves[j], behind[j]) for j in range(len(leaves))):
                skips.append((i, candidate))
                break
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
    if start not in behind or start is term.value:
        return False
    region = between(start, term.value)
    inside = {start, *region}
    return any(v.op is not None and is_mixing(v.op, inside) for v in region)


def _branches(tree: Term, skips: set[int]) -> list[Term]:
    """The largest subtrees without a skip in them."""
    if id(tree) in skips:
        return []
    if not any(id(leaf) in skips for leaf in tree.leaves()):
        return [tree]
    return [branch for term in tree.inner for branch in _branches(term, skips)]


def _factors(number: float) -> tuple[Factor, ...]:
    return () if number == 1 else (number,)


def _number(x: object) -> float:
    return float(x) if isinstance(x, int | float) else 1.0
