"""What a branch has inside: norms on q, k, v and before its last map, scalar biases, reparametrised maps."""

import math
from typing import Literal

from normscope.anatomy.attention import Attention
from normscope.anatomy.branches import Limb
from normscope.anatomy.graph import Op, Value, ancestors
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import MATMULS, SAME, is_weight, weight_of
from normscope.anatomy.terms import scale_step

QKNorm = Literal["none", "head", "full", "cosine"]
_PRODUCTS = MATMULS | {
    "dot",
    "vdot",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_svdvals",
    "_linalg_svd",
}


def qk_norm(limb: Limb, norms: dict[Value, FoundNorm]) -> QKNorm:
    """The norm on queries and keys: of each head, of the full width, or unit vectors (cosine attention)."""
    found: set[QKNorm] = {
        _qk_norm(operand, limb, norms) for a in limb.attentions for operand in (a.query, a.key)
    }
    if found == {"head", "full"}:  # a single head of keys is its full width
        return "head"
    return found.pop() if len(found) == 1 else "none"


def _qk_norm(operand: Value, limb: Limb, norms: dict[Value, FoundNorm]) -> QKNorm:
    for norm, projection in _passed(operand, limb, norms):
        if norm.kind == "l2norm":
            return "cosine"
        # One head alone is the full width, too.
        return "full" if norm.input.shape[-1] == projection.outputs[0].shape[-1] else "head"
    return "none"


def value_normed(limb: Limb, norms: dict[Value, FoundNorm]) -> bool:
    """Whether every attention of the branch norms its values."""
    attentions: list[Attention] = limb.attentions
    return bool(attentions) and all(_passed(a.value, limb, norms) for a in attentions)


def _passed(operand: Value, limb: Limb, norms: dict[Value, FoundNorm]) -> list[tuple[FoundNorm, Op]]:
    """Norms between an attention's operand and the projection that makes it, with that projection."""
    found: list[tuple[FoundNorm, Op]] = []
    stack: list[tuple[Value, FoundNorm | None]] = [(operand, None)]
    seen: set[Value] = set()
    while stack:
        value, passed = stack.pop()
        if value in seen or value.op is None or not value.live:
            continue
        seen.add(value)
        norm = norms.get(value)
        if weight_of(value.op) is not None:
            if passed is not None:
                found.append((passed, value.op))
        elif norm is not None and norm not in limb.norms_in:
            stack.append((norm.input, norm))
        else:
            stack.extend((v, passed) for v in value.op.inputs)
    return found


def inner_norm(limb: Limb, norms: dict[Value, FoundNorm]) -> bool:
    """Whether the last matmul reads a norm other than the entry's (Sub-LN); not for other kinds."""
    if limb.kind == "other" or len(limb.mixers) < 2:
        return False
    last = max(limb.mixers, key=lambda op: op.outputs[0].index)
    for value in last.inputs:
        value = value.behind(SAME)
        if value in norms and norms[value] not in limb.norms_in:
            return True
    return False


def scalar_bias(limb: Limb) -> bool:
    """Whether a learnt number is added somewhere on the way (Fixup)."""
    ways = [*limb.region, limb.sum.value]
    return any(
        v.op is not None and v.base == "add" and any(is_weight(b) and _numel(b) == 1 for b in v.op.inputs)
        for v in ways
    )


def divided_by_norm(limb: Limb) -> bool:
    """Whether every map of the branch is (γ/σ(W))·W with a learnt γ and a σ made of W (σReparam)."""
    weights = [weight for op in limb.mixers if (weight := weight_of(op)) is not None]
    return bool(weights) and all(map(_is_divided, weights))


def _is_divided(weight: Value) -> bool:
    behind = ancestors([weight], -1)
    leaves = [v for v in behind if v.origin == "parameter"]
    matrices = {v for v in leaves if _numel(v) == _numel(weight)}
    if not any(_numel(v) == 1 for v in leaves if v not in matrices):
        return False
    products = (v for v in behind if v.base in _PRODUCTS)
    return any(not matrices.isdisjoint(ancestors([v], -1)) for v in products)


def entry_scale(limb: Limb) -> float | None:
    """The number that multiplies the norm at the entry before anything reads it."""
    for norm in limb.norms_in:
        for op in norm.output.users:
            scaled = scale_step(op.outputs[0]) if op.outputs else None
            if scaled is not None and scaled[0] is norm.output and isinstance(scaled[1], float):
                return scaled[1]
    return None


def _numel(value: Value) -> int:
    return math.prod(value.shape)
