"""Catalogue names that the dataflow decides; None where it does not (initialisation alone tells GPT-2 from
Pre-LN).
"""

import math

from normscope.anatomy.branches import Limb
from normscope.anatomy.graph import Value
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import SAME
from normscope.anatomy.terms import Factor, scale_step
from normscope.anatomy.types import Placement, Scale


def combine(terms: list[tuple[Factor, ...]]) -> Scale:
    """Σ Π of factors as one scale: a number, "learnt" (a gate sets it, too), or None for 1."""
    factors = [f for term in terms for f in term]
    if any(isinstance(f, str) for f in factors):
        return "learnt"
    total = sum(math.prod(float(f) for f in term) for term in terms)
    return None if math.isclose(total, 1.0, rel_tol=1e-9) else total


def join_of(stream: list[tuple[Factor, ...]], branch: list[tuple[Factor, ...]]) -> str:
    """ "gate", "learnt", "scaled" or "add"."""
    factors = {f for term in (*stream, *branch) for f in term}
    if "gate" in factors:
        return "gate"
    if "learnt" in factors:
        return "learnt"
    return "add" if combine(stream) is None and combine(branch) is None else "scaled"


def placement_of(limb: Limb, post: bool) -> Placement:
    """The slots' name. A norm on the stream wins: B2T, KEEL have the placement of their outer norm."""
    if post:
        return "post"
    before = bool(limb.norms_in) and not limb.raw_entry
    after = limb.norm_out is not None
    if before and after:
        return "peri"
    if after:
        return "res-post"
    return "pre" if before else "none"


def scheme_of(limb: Limb, placement: Placement, join: str, norms: dict[Value, FoundNorm]) -> str | None:
    """The catalogue name of one branch."""
    total = limb.sum
    stream, branch = combine(total.stream_factors), combine(limb.factors)
    kinds = {norm.kind for norm in limb.norms_in}
    if limb.parallel:
        return "parallel"
    if placement == "post":
        if total.long_skips:
            return "b2t"
        if total.skip_norm is not None or (limb.norm_out is not None and join == "learnt"):
            return "ngpt"
        if limb.norms_in and not limb.raw_entry:
            return "keel" if isinstance(stream, float) else None
        if isinstance(stream, float) and stream > 1 and branch is None:
            return "deepnorm"
        return "admin" if stream == "learnt" and branch is None else None
    if join == "gate":
        return "highway" if placement == "none" else None
    if join == "learnt" and stream is None:
        return "layerscale" if _is_vector(limb) else ("rezero" if placement == "none" else None)
    if placement == "pre":
        if "other" in kinds:
            return "dyt"
        if kinds == {"l2norm"}:
            return "scalenorm"
        if _divided(limb.norms_in):
            return "layernorm-scaling"
        if inner_norm(limb, norms):
            return "sub-ln"
    return None


def _is_vector(limb: Limb) -> bool:
    """Whether the learnt scale on the branch has an entry a feature (LayerScale) rather than one (ReZero)."""
    value = limb.output
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


def _divided(found: list[FoundNorm]) -> bool:
    """Whether a number less than one multiplies the norm before anything reads it."""
    for norm in found:
        for op in norm.output.users:
            scaled = scale_step(op.outputs[0]) if op.outputs else None
            if scaled is not None and scaled[0] is norm.output and isinstance(scaled[1], float):
                return 0 < scaled[1] < 1
    return False


def inner_norm(limb: Limb, norms: dict[Value, FoundNorm]) -> bool:
    """Whether the last matmul reads a norm other than the entry's (Sub-LN); not for other kinds."""
    if limb.kind == "other" or len(limb.mixers) < 2:
        return False
    last = max(limb.mixers, key=lambda op: op.outputs[0].index)
    for value in last.inputs:
        while value.base in SAME:
            value = value.source
        if value in norms and norms[value] not in limb.norms_in:
            return True
    return False
