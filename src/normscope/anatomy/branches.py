"""Name what each branch of a sum does and where its norms sit.

From the skip, walk forward until a norm or something learnt is met: when norms come first on every way, the
branch is normed at its entry. From the branch's end, walk back through views and scales: a norm met there is
at its output. Whether a norm follows the sum is seen by the next sum (`streams`).
"""

import math
from dataclasses import dataclass, field

from normscope.anatomy.attention import (
    Attention,
    has_linear_attention,
    is_fused_attention,
    mixes_tokens,
    projections_into,
)
from normscope.anatomy.gates import Through, let_through
from normscope.anatomy.graph import Op, Value, between
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME, is_mixing, is_weight
from normscope.anatomy.residual import Sum
from normscope.anatomy.terms import Factor, Term, Weights, scale_step, step_weight
from normscope.anatomy.types import Kind


@dataclass(eq=False)
class Limb:
    """A branch while it is being read: the term, what it is made of, the norms found at its ends."""

    sum: Sum
    output: Value
    factors: list[tuple[Factor, ...]]
    region: list[Value]
    mixers: list[Op]
    attentions: list[Attention]
    kind: Kind
    norms_in: list[FoundNorm] = field(default_factory=list)
    norm_out: FoundNorm | None = None
    raw_entry: bool = False
    parallel: bool = False
    recurrent: bool = False
    vector: bool = False
    fused: Weights | None = ()


def read_limbs(total: Sum, norms: dict[Value, FoundNorm], attentions: list[Attention]) -> list[Limb]:
    """The branches of a sum; a plain sum of an attention and something else is two parallel branches."""
    limbs = [limb for term in total.branches for limb in _split(total, term, norms, attentions)]
    for limb in limbs:
        limb.parallel = len(limbs) > 1
    return sorted(limbs, key=lambda limb: limb.region[-1].index)


def _split(total: Sum, term: Term, norms: dict[Value, FoundNorm], attentions: list[Attention]) -> list[Limb]:
    whole = _limb(total, term, norms, attentions)
    if whole is None:
        return []
    parts = [_limb(total, leaf, norms, attentions) for leaf in term.inner]
    found = [part for part in parts if part is not None]
    if len(found) > 1 and len({part.kind for part in found}) > 1 and whole.norm_out is None:
        return [limb for leaf in term.inner for limb in _split(total, leaf, norms, attentions)]
    return [whole]


def _limb(total: Sum, term: Term, norms: dict[Value, FoundNorm], attentions: list[Attention]) -> Limb | None:
    region, added, fused = total.region(term), None, term.fused
    gated = any("gate" in factors for factors in total.stream_factors)
    inside = {total.start, *region}
    if total.spread is not None:
        term, added = Term(total.spread, term.factors), term.value
    end, factors, norm_out = _end(term, inside, norms, gated)
    through = let_through(term.value, total.skip, inside) if gated else Through(term.value)
    if through.value is not term.value:  # the maps of the gate are not the branch's
        region = between(total.skip, through.value)
        inside = {total.skip, *region}
        norm_out = norms.get(through.value)
    mixers = [op for op in dict.fromkeys(v.op for v in region) if op is not None and is_mixing(op, inside)]
    if not mixers:
        return None
    own = [a for a in attentions if a.output in inside]
    side = [op for a in own for op in _from_elsewhere(a, inside, total.start) if op not in set(mixers)]
    kind = _kind(region, own)
    if own and not any(a.key in inside or a.value in inside for a in own):
        kind = "cross-attention"
    vector = _is_vector(end)
    while end.op is not None and end.op.virtual and (scaled := scale_step(end)) is not None:
        fused = (step_weight(end, scaled), *fused)
        end = scaled[0]  # addcmul adds a product that is no tensor of its own
    output = end if added is None else added
    limb = Limb(
        total,
        output,
        [factors],
        region,
        [*side, *mixers],
        own,
        kind,
        norm_out=norm_out,
    )
    limb.recurrent, limb.vector = through.recurrent, vector
    limb.fused = None if is_unseen_product(output) else fused
    limb.norms_in, raw = _entry(total.start, inside, norms)
    # A gate on the stream reads it raw, whatever the branch does (GTrXL).
    limb.raw_entry = raw and not (gated and limb.norms_in)
    return limb


def _from_elsewhere(a: Attention, inside: set[Value], start: Value) -> list[Op]:
    """The maps that make keys and values of a second stream; not those of an earlier block, mixed in."""
    own = a.key in inside or a.value in inside
    return [op for op in projections_into(a) if not own or op.outputs[0].index > start.index]


def is_unseen_product(value: Value) -> bool:
    """Whether this is the product inside addcmul or addmm, which is no tensor of its own."""
    return value.op is not None and value.op.virtual and value.base not in {"alias", "overwrite"}


def _is_vector(value: Value) -> bool:
    """Whether the learnt scale on a branch has an entry a feature (LayerScale) rather than one (ReZero)."""
    while value.op is not None:
        scaled = scale_step(value)
        if scaled is not None:
            others = [v for v in value.op.inputs if v is not scaled[0]]
            if others and others[0].learnt:
                return math.prod(others[0].shape) > 1
            value = scaled[0]
        elif value.base in SAME:
            value = value.source
        else:
            break
    return False


def _kind(region: list[Value], own: list[Attention]) -> Kind:
    if own or is_fused_attention(region):
        return "attention"
    if mixes_tokens(region):
        return "other"
    return "attention" if has_linear_attention(region) else "feed-forward"


def _end(
    term: Term, inside: set[Value], norms: dict[Value, FoundNorm], gated: bool
) -> tuple[Value, tuple[Factor, ...], FoundNorm | None]:
    """The term as it is added, all factors on it, and the norm at its end."""
    value, factors = term.value, term.factors
    while True:
        if value in norms and norms[value].input in inside:
            return term.value, factors, norms[value]
        scaled = scale_step(value)
        if (
            scaled is not None
            and scaled[1] == "gate"
            and not gated
            and _gates_itself(value, scaled[0], inside)
        ):
            scaled = None
        if (value.base in SAME or _is_shift(value)) and value.source in inside:
            value = value.source
        elif scaled is not None and scaled[0] in inside:
            value, factors = scaled[0], (*factors, scaled[1])
        else:
            return term.value, factors, None


def _is_shift(value: Value) -> bool:
    """Whether a learnt number is all that is added (Fixup)."""
    if value.base != "add" or value.op is None or len(value.op.inputs) != 2:
        return False
    bias = value.op.inputs[1]
    return is_weight(bias) and math.prod(bias.shape) == 1


def _gates_itself(value: Value, carrier: Value, inside: set[Value]) -> bool:
    """Whether a product's other factor comes from the stream, too: a gated unit, part of the branch."""
    assert value.op is not None
    return any(v is not carrier and v in inside for v in value.op.inputs)


def _entry(skip: Value, inside: set[Value], norms: dict[Value, FoundNorm]) -> tuple[list[FoundNorm], bool]:
    """Norms met first on the ways in, and whether something learnt is met without one."""
    by_input: dict[Value, list[FoundNorm]] = {}
    for norm in norms.values():
        if norm.output in inside and norm.input in inside:
            by_input.setdefault(norm.input, []).append(norm)
    found: list[FoundNorm] = []
    raw, queue, seen = False, [skip], set()
    while queue:
        value = queue.pop()
        if value in seen:
            continue
        seen.add(value)
        hidden: set[Value] = set()
        for norm in by_input.get(value, ()):
            found.append(norm)
            hidden.update(between(value, norm.output))
        for op in value.users:
            outputs = [v for v in op.outputs if v in inside and v not in hidden]
            if outputs and is_mixing(op, inside):
                raw = True
            else:
                queue.extend(outputs)
    return sorted(found, key=lambda n: n.output.index), raw
