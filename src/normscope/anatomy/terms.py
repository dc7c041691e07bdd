"""Take a sum apart into terms with factors.

add, add(alpha), sub, lerp, stack + sum, and n-ary chains of adds that nothing else reads, with the scales in
front of such chains. A factor is a number, a parameter ("learnt") or an activation ("gate"). Of those that a
term meets behind its tensor, in the add itself or behind an inner add, `fused` says where they are.
"""

import math
from dataclasses import dataclass, field

from normscope.anatomy.calls import Call
from normscope.anatomy.graph import Op, Value, operand
from normscope.anatomy.ops import SAME, is_weight
from normscope.anatomy.types import Fused, Site

Factor = float | str
"""A number, "learnt" or "gate"."""
Weights = tuple[float | Fused, ...]
"""Numbers, and tensors by their place, that a term is multiplied with."""


@dataclass(eq=False)
class Term:
    """One term of a sum: a value times factors; `inner` are the terms it is itself the plain sum of.

    `fused` are those of the factors that `value` has not met yet.
    """

    value: Value
    factors: tuple[Factor, ...] = ()
    inner: list["Term"] = field(default_factory=list)
    add: Op | None = None
    fused: Weights = ()

    def leaves(self) -> list["Term"]:
        """The terms at the bottom."""
        return [leaf for term in self.inner for leaf in term.leaves()] if self.inner else [self]


def direct_terms(op: Op) -> list[Term]:
    """The tensors an additive op adds, with their factors; empty for other ops and for biases."""
    terms = _lerped(op)
    if terms:
        pass
    elif op.base in {"add", "sub", "rsub"} and len(op.inputs) == 2:
        a, b = op.inputs
        alpha = _number(op.kwargs.get("alpha", 1))
        if op.base == "rsub":
            a, b = b, a
        terms = [
            _times(a, _number(op.kwargs.get("beta", 1))),
            _times(b, alpha if op.base == "add" else -alpha),
        ]
    elif op.base == "lerp":
        weight = op.args[2]
        if isinstance(weight, Value) and weight.number is None:
            kind: Factor = "gate" if weight.live else "learnt"
            at = operand(op, 2)
            terms = [
                Term(op.inputs[0], (kind,), fused=(Fused(at, "rest"),)),
                Term(op.inputs[1], (kind,), fused=(Fused(at, "times"),)),
            ]
        else:
            number = _number(weight.number if isinstance(weight, Value) else weight)
            terms = [_times(op.inputs[0], 1 - number), _times(op.inputs[1], number)]
    elif op.base == "sum" and op.source.base in {"stack", "cat"} and op.source.op is not None:
        terms = _stacked(op, op.source.op)
    shape = op.outputs[0].shape if op.outputs else ()
    if any(not t.value.floating or len(t.value.shape) != len(shape) for t in terms):
        return []
    return terms


def _lerped(op: Op) -> list[Term]:
    """(1 − z)·a and z·b of a + z·(b − a), as a GRU writes it; empty for anything else."""
    if op.base != "add" or len(op.inputs) != 2 or op.kwargs.get("alpha", 1) != 1:
        return []
    for a, product in (op.inputs, op.inputs[::-1]):
        if product.op is None or product.base != "mul" or len(product.op.inputs) != 2:
            continue
        for number, difference in enumerate(product.op.inputs):
            step = difference.op
            if step is not None and step.base == "sub" and len(step.inputs) == 2 and step.inputs[1] is a:
                share = product.op.inputs[1 - number]
                if share.live or share.learnt:
                    kind: Factor = "gate" if share.live else "learnt"
                    at = operand(product.op, 1 - number)
                    stays = Term(a, (kind,), add=step, fused=(Fused(at, "rest"),))
                    return [stays, Term(step.inputs[0], (kind,), fused=(Fused(at, "times"),))]
    return []


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


def terms_of(op: Op, within: Call | None = None) -> list[Term]:
    """`direct_terms`, chains of adds that nothing else reads taken apart (those of one module call only)."""
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

    Of two activations the carrier is the one that is not squashed (sigmoid, softmax, tanh, 1 − gate).
    """
    op = value.op
    if op is None:
        return None
    if op.base == "neg":
        return op.inputs[0], -1.0
    if op.base == "sub":
        return _shrunk(op)
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


def step_weight(value: Value, step: tuple[Value, Factor]) -> float | Fused:
    """The factor of a `scale_step` as a number or as the place of its tensor."""
    op, (carrier, factor) = value.op, step
    assert op is not None
    if op.base == "sub":
        product = op.inputs[1].op
        assert product is not None
        return Fused(_other(product, carrier), "rest")
    if len(op.inputs) == 1:
        assert not isinstance(factor, str)
        return factor
    return Fused(_other(op, carrier), "over" if op.base == "div" else "times")


def _other(op: Op, carrier: Value) -> Site:
    return operand(op, 1 - op.inputs.index(carrier))


def core(value: Value) -> Value:
    """A term before views and scales."""
    while value.op is not None:
        scaled = scale_step(value)
        if value.base in SAME:
            value = value.source
        elif scaled is not None and scaled[1] != "gate":
            value = scaled[0]
        else:
            break
    return value


def _shrunk(op: Op) -> tuple[Value, Factor] | None:
    """x − c·x is (1 − c)·x with a learnt c (GPAS)."""
    if len(op.inputs) != 2 or op.inputs[1].op is None:
        return None
    x, product = op.inputs
    away = scale_step(product) if product.base == "mul" else None
    return (x, "learnt") if away == (x, "learnt") else None


def _is_gate(value: Value) -> bool:
    while value.base in SAME or value.base in {"rsub", "select", "slice", "split"}:
        value = value.op.inputs[-1]  # type: ignore[union-attr]
    return value.base in {"sigmoid", "_softmax", "softmax", "_safe_softmax", "hardsigmoid", "tanh"}


def _times(value: Value, number: float) -> Term:
    return Term(value) if number == 1 else Term(value, (number,), fused=(number,))


def _number(x: object) -> float:
    return float(x) if isinstance(x, int | float) else 1.0
