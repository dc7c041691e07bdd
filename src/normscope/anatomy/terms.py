"""Split a sum into terms with factors.

A sum is an add, add(alpha), sub, lerp, stack + sum, or an n-ary chain of adds that nothing else reads, with
the scales in front of it. A factor is a number, a parameter ("learnt") or an activation ("gate"). `fused`
lists the factors applied after a term's tensor, in the add itself or after an inner add.
"""

import math
from dataclasses import dataclass, field

from normscope.anatomy.calls import Call
from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import SAME, SOFTMAX, op_set
from normscope.anatomy.types import Fused, Scale, Site

Factor = float | str
"""A number, "learnt" or "gate"."""
Weights = tuple[float | Fused, ...]
"""Factors of a term: numbers, and tensors by their site."""
_SQUASHED = SOFTMAX | op_set("sigmoid hardsigmoid tanh")


@dataclass(eq=False)
class Term:
    """One term of a sum: a value times factors.

    Attributes:
        inner: the terms that it is the plain sum of; `add` is the op that sums them.
        fused: the factors not yet applied to `value`.
    """

    value: Value
    factors: tuple[Factor, ...] = ()
    inner: list["Term"] = field(default_factory=list)
    add: Op | None = None
    fused: Weights = ()

    def leaves(self) -> list["Term"]:
        """The terms at the bottom."""
        return [leaf for term in self.inner for leaf in term.leaves()] if self.inner else [self]


def direct_terms(op: Op | None) -> list[Term]:
    """The tensors an additive op adds, with their factors; empty for other ops and for biases."""
    if op is None or not op.outputs:
        return []
    terms = _gru(op) or _added(op) or _stacked(op)
    rank, size = len(op.outputs[0].shape), op.outputs[0].numel
    if any(not t.value.floating for t in terms):
        return []
    # A term of lower rank is a bias, unless it has every element: x (1, T, D) + F(x[0]).
    return terms if all(len(t.value.shape) == rank or t.value.numel == size for t in terms) else []


def _added(op: Op) -> list[Term]:
    """The terms of add, sub and lerp."""
    if op.base == "lerp":
        weight = op.args[2]
        if isinstance(weight, Value) and weight.number is None:
            return _shares(op.inputs[0], op.inputs[1], weight, op.operand(2))
        number = _number(weight.number if isinstance(weight, Value) else weight)
        return [_times(op.inputs[0], 1 - number), _times(op.inputs[1], number)]
    if op.base not in {"add", "sub", "rsub"} or len(op.inputs) != 2:
        return []
    a, b = op.inputs if op.base != "rsub" else op.inputs[::-1]
    alpha = _number(op.kwargs.get("alpha", 1))
    return [_times(a, _number(op.kwargs.get("beta", 1))), _times(b, alpha if op.base == "add" else -alpha)]


def _gru(op: Op) -> list[Term]:
    """(1 − z)·a and z·b of a + z·(b − a), the form of a GRU; empty for anything else."""
    if op.base != "add" or len(op.inputs) != 2 or op.kwargs.get("alpha", 1) != 1:
        return []
    for a, product in (op.inputs, op.inputs[::-1]):
        if product.op is None or product.base != "mul" or len(product.inputs) != 2:
            continue
        for number, difference in enumerate(product.inputs):
            share = product.inputs[1 - number]
            is_step = difference.base == "sub" and len(difference.inputs) == 2 and difference.inputs[1] is a
            if is_step and (share.live or share.learnt):
                terms = _shares(a, difference.source, share, product.op.operand(1 - number))
                terms[0].add = difference.op
                return terms
    return []


def _shares(a: Value, b: Value, share: Value, site: Site) -> list[Term]:
    """(1 − z)·a and z·b."""
    kind: Factor = "gate" if share.live else "learnt"
    return [
        Term(a, (kind,), fused=(Fused(site, "rest"),)),
        Term(b, (kind,), fused=(Fused(site, "times"),)),
    ]


def _stacked(op: Op) -> list[Term]:
    """The terms of stack(...).sum(dim) over the stacked axis; empty for anything else."""
    stack = op.inputs[0].op if op.base == "sum" else None
    if stack is None or stack.base not in {"stack", "cat"}:
        return []
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


def terms_of(op: Op, within: Call | None = None) -> list[Term]:
    """`direct_terms`, with chains of adds that nothing else reads split (within one module call only)."""
    terms = direct_terms(op)
    for term in terms:
        _take_apart(term, within)
    return terms


def _take_apart(term: Term, within: Call | None) -> None:
    value, factors, fused = term.value, term.factors, term.fused
    while value.op is not None and len(value.users) == 1:
        scaled = scale_step(value)
        if value.base in SAME and value.shape == value.source.shape:
            value = value.source
        elif scaled is not None and scaled[1] != "gate":
            fused = (step_weight(value, scaled), *fused)
            value, factors = scaled[0], (*factors, scaled[1])
        else:
            break
    if value.op is None or len(value.users) != 1 or within not in {None, value.op.call}:
        return
    inner = direct_terms(value.op)
    if len(inner) < 2 or not all(t.value.live for t in inner):
        return
    term.inner, term.add = inner, value.op
    for each in inner:
        each.factors = (*each.factors, *factors)
        each.fused = (*each.fused, *fused)
        _take_apart(each, within)


def scale_step(value: Value) -> tuple[Value, Factor] | None:
    """(carrier, factor) of a product with a number, a parameter, or a gate; None for anything else.

    The carrier of a product of two activations is the one that is not squashed (sigmoid, softmax, tanh,
    1 − gate).
    """
    op = value.op
    if op is None:
        return None
    if op.base == "neg":
        return op.source, -1.0
    if op.base == "sub":
        return _shrunk(op)
    if op.base not in {"mul", "div"}:
        return None
    if len(op.inputs) == 1:
        return op.source, _inverse(op, _number(op.args[1] if isinstance(op.args[0], Value) else op.args[0]))
    a, b = op.inputs
    is_scale = a.is_weight or a.number is not None or a.shape != value.shape
    if op.base == "mul" and not a.live and b.live and is_scale:
        a, b = b, a
    if not b.live:
        if b.number is not None:
            return a, _inverse(op, b.number)
        return a, "learnt" if b.learnt else 1.0  # neither live nor learnt nor one number: a dropout mask
    if op.base == "div":
        return None
    for mask, carrier in ((a, b), (b, a)):
        if carrier.learnt and not mask.learnt and mask.numel < carrier.numel:
            return carrier, 1.0  # computed from the input alone: a padding mask
    return (b, "gate") if _is_gate(a) and not _is_gate(b) else (a, "gate")


def _inverse(op: Op, number: float) -> float:
    """The factor of a product or quotient, `number` or its inverse; zero is not inverted."""
    return 1 / number if op.base == "div" and number else number


def step_weight(value: Value, step: tuple[Value, Factor]) -> float | Fused:
    """The factor of a `scale_step` as a number or as the site of its tensor."""
    op, (carrier, factor) = value.op, step
    assert op is not None
    if op.base == "sub":
        product = op.inputs[1].op
        assert product is not None
        return Fused(product.operand(1 - product.inputs.index(carrier)), "rest")
    if len(op.inputs) == 1:
        assert not isinstance(factor, str)
        return factor
    return Fused(op.operand(1 - op.inputs.index(carrier)), "over" if op.base == "div" else "times")


def core(value: Value) -> Value:
    """A term before views and scales."""
    return factored(value)[0]


def factored(value: Value) -> tuple[Value, tuple[Factor, ...]]:
    """A term before views and scales, and the factors of those scales."""
    factors: tuple[Factor, ...] = ()
    while value.op is not None:
        scaled = scale_step(value)
        if value.base in SAME:
            value = value.source
        elif scaled is not None and scaled[1] != "gate":
            value, factors = scaled[0], (*factors, scaled[1])
        else:
            break
    return value, factors


def _shrunk(op: Op) -> tuple[Value, Factor] | None:
    """x − c·x is (1 − c)·x with a learnt c (GPAS)."""
    if len(op.inputs) != 2:
        return None
    x, product = op.inputs
    away = scale_step(product) if product.base == "mul" else None
    return (x, "learnt") if away == (x, "learnt") else None


def _is_gate(value: Value) -> bool:
    while value.base in SAME or value.base in {"rsub", "select", "slice", "split"}:
        value = value.inputs[-1]
    return value.base in _SQUASHED


def _times(value: Value, number: float) -> Term:
    return Term(value) if number == 1 else Term(value, (number,), fused=(number,))


def _number(x: object) -> float:
    return float(x) if isinstance(x, int | float) else 1.0


def combine(terms: list[tuple[Factor, ...]]) -> Scale:
    """Σ Π of factors as one scale: a number, "learnt" (also for a gate), or None for 1."""
    if any(isinstance(f, str) for term in terms for f in term):
        return "learnt"
    total = sum(math.prod(float(f) for f in term) for term in terms)
    return None if math.isclose(total, 1.0, rel_tol=1e-9) else total
