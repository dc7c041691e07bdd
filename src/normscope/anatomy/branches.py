"""Find the branches of a sum, their kinds and the placement of their norms.

The search goes forward from the skip to the first norm or learnt op on every path. Where all paths meet a
norm first, the branch is normed at its entry. From the branch's end the search goes back through views and
scales: a norm found there is at the output. A norm after the sum is found from the next sum (`streams`).
"""

from dataclasses import dataclass

from normscope.anatomy.attention import (
    Attention,
    has_linear_attention,
    mixes_tokens,
    projections_into,
)
from normscope.anatomy.gates import let_through
from normscope.anatomy.graph import Op, Value, between, search
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import FUSED_ATTENTION, SAME, is_mixing
from normscope.anatomy.residual import Sum
from normscope.anatomy.terms import Factor, Term, Weights, combine, scale_step, step_weight
from normscope.anatomy.types import Kind, Placement, Scale


@dataclass(eq=False)
class FoundBranch:
    """A branch while it is being read.

    Attributes:
        output: the added term; `factors` are all of its factors, `fused` those that the add applies.
        region: all values between the stream and the output; `mixers` are the mixing ops in it.
        norms_in, norm_out: the norms at its two ends.
        raw_entry: whether a learnt op reads the stream without a norm.
        parallel: whether the sum has several branches.
        recurrent: whether its gate is a GRU.
        vector: whether its learnt scale has one entry per feature (LayerScale) rather than one (ReZero).
        scheme: its catalogue name; see `schemes`.
    """

    sum: Sum
    output: Value
    factors: tuple[Factor, ...]
    region: list[Value]
    mixers: list[Op]
    attentions: list[Attention]
    kind: Kind
    norms_in: list[FoundNorm]
    norm_out: FoundNorm | None
    raw_entry: bool
    recurrent: bool
    vector: bool
    fused: Weights | None
    parallel: bool = False
    scheme: str | None = None

    @property
    def normed(self) -> bool:
        """True where a norm is at its entry."""
        return bool(self.norms_in) and not self.raw_entry

    @property
    def placement(self) -> Placement:
        """Name of the slots that hold norms. A norm on the stream decides: B2T and KEEL are "post"."""
        if self.sum.norms_behind:
            return "post"
        if self.norm_out is not None:
            return "peri" if self.normed else "res-post"
        return "pre" if self.normed else "none"

    @property
    def norms(self) -> list[FoundNorm]:
        """The norms in the slots: at the entry, at the end, on the stream."""
        ends = [self.norm_out] if self.norm_out is not None else []
        return [*self.norms_in, *ends, *self.sum.norms_behind]

    @property
    def stream_scale(self) -> Scale:
        """α of `α·x + β·F(x)`."""
        return combine(self.sum.stream_factors)

    @property
    def branch_scale(self) -> Scale:
        """β of `α·x + β·F(x)`."""
        return combine([self.factors])

    @property
    def join(self) -> str:
        """The way the branch meets the stream: "streams", "gate", "learnt", "scaled" or "add"."""
        factors = {f for term in (*self.sum.stream_factors, self.factors) for f in term}
        if self.sum.several:
            return "streams"
        if "gate" in factors or "learnt" in factors:
            return "gate" if "gate" in factors else "learnt"
        return "add" if self.stream_scale is None and self.branch_scale is None else "scaled"


def find_branches(total: Sum, attentions: list[Attention]) -> list[FoundBranch]:
    """The branches of a sum; a plain sum of an attention and something else is two parallel branches."""
    branches = [branch for term in total.terms for branch in _split(total, term, attentions)]
    for branch in branches:
        branch.parallel = len(branches) > 1
    return sorted(branches, key=lambda branch: branch.region[-1].index)


def _split(total: Sum, term: Term, attentions: list[Attention]) -> list[FoundBranch]:
    whole = _branch(total, term, attentions)
    if whole is None:
        return []
    parts = [_branch(total, leaf, attentions) for leaf in term.inner]
    kinds = [part.kind for part in parts if part is not None]
    if len(kinds) > 1 and len(set(kinds)) > 1 and whole.norm_out is None:
        return [branch for leaf in term.inner for branch in _split(total, leaf, attentions)]
    return [whole]


def _branch(total: Sum, term: Term, attentions: list[Attention]) -> FoundBranch | None:
    region, added, fused = total.region(term), None, term.fused
    gated = any("gate" in factors for factors in total.stream_factors)
    inside = {total.start, *region}
    if total.spread is not None:
        term, added = Term(total.spread, term.factors), term.value
    end, (factors, norm_out) = term.value, _end(term, inside, gated)
    behind_gate, recurrent = let_through(term.value, total.skip, inside) if gated else (term.value, False)
    if behind_gate is not term.value:  # the gate's maps are not part of the branch
        region = between(total.skip, behind_gate)
        inside = {total.skip, *region}
        norm_out = behind_gate.norm
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
        end = scaled[0]  # the product that addcmul adds is no tensor of its own
    output = end if added is None else added
    norms_in, raw = _entry(total.start, inside)
    return FoundBranch(
        total,
        output,
        factors,
        region,
        [*side, *mixers],
        own,
        kind,
        norms_in,
        norm_out,
        raw_entry=raw and not (gated and norms_in),  # a gate reads the stream raw, whatever the branch does
        recurrent=recurrent,
        vector=vector,
        fused=None if is_unseen_product(output) else fused,
    )


def _from_elsewhere(a: Attention, inside: set[Value], start: Value) -> list[Op]:
    """The maps that make keys and values from a second stream; without values of an earlier block."""
    own = a.key in inside or a.value in inside
    return [op for op in projections_into(a) if not own or op.outputs[0].index > start.index]


def is_unseen_product(value: Value) -> bool:
    """True where this is the product inside addcmul or addmm, which is no tensor of its own."""
    return value.op is not None and value.op.virtual and value.base not in {"alias", "overwrite"}


def _is_vector(value: Value) -> bool:
    """True where the learnt scale on a branch has several entries."""
    while True:
        scaled = scale_step(value)
        if scaled is not None:
            other = next((v for v in value.inputs if v is not scaled[0]), None)
            if other is not None and other.learnt:
                return other.numel > 1
            value = scaled[0]
        elif value.base in SAME:
            value = value.source
        else:
            return False


def _kind(region: list[Value], own: list[Attention]) -> Kind:
    if own or any(v.base in FUSED_ATTENTION for v in region):
        return "attention"
    if mixes_tokens(region):
        return "other"
    return "attention" if has_linear_attention(region) else "feed-forward"


def _end(term: Term, inside: set[Value], gated: bool) -> tuple[tuple[Factor, ...], FoundNorm | None]:
    """All factors on a term, and the norm at its end."""
    value, factors = term.value, term.factors
    while True:
        if value.norm is not None and value.norm.input in inside:
            return factors, value.norm
        scaled = scale_step(value)
        if scaled is not None and scaled[1] == "gate" and not gated:
            # A product with another factor from the stream is a gated unit: part of the branch.
            is_unit = any(v is not scaled[0] and v in inside for v in value.inputs)
            scaled = None if is_unit else scaled
        if (value.base in SAME or _is_shift(value)) and value.source in inside:
            value = value.source
        elif scaled is not None and scaled[0] in inside:
            value, factors = scaled[0], (*factors, scaled[1])
        else:
            return factors, None


def _is_shift(value: Value) -> bool:
    """True where only a learnt number is added (Fixup)."""
    bias = value.inputs[1] if value.base == "add" and len(value.inputs) == 2 else None
    return bias is not None and bias.is_weight and bias.numel == 1


def _entry(skip: Value, inside: set[Value]) -> tuple[list[FoundNorm], bool]:
    """Norms met first on the paths from the skip, and whether a learnt op is met without one."""

    def norms_at(value: Value) -> list[FoundNorm]:
        return [norm for norm in value.norms_behind if norm.output in inside]

    def beside_norms(value: Value) -> list[Value]:
        hidden = {v for norm in norms_at(value) for v in between(value, norm.output)}
        return [v for v in value.successors if v in inside and v not in hidden]

    reached = list(
        search([skip], lambda value: (v for v in beside_norms(value) if not is_mixing(v.op, inside)))
    )
    raw = any(is_mixing(v.op, inside) for value in reached for v in beside_norms(value))
    found = (norm for value in reached for norm in norms_at(value))
    return sorted(found, key=lambda n: n.output.index), raw
