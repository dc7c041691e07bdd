"""Details inside a branch: norms on q, k, v and before its last map, scalar biases, reparametrised maps."""

from typing import Literal

from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value, ancestors
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import MATMULS, SAME, op_set, weight_of
from normscope.anatomy.terms import scale_step

QKNorm = Literal["none", "head", "full", "cosine"]
_PRODUCTS = MATMULS | op_set("dot vdot linalg_vector_norm linalg_matrix_norm linalg_svdvals _linalg_svd")


def qk_norm(branch: FoundBranch) -> QKNorm:
    """The norm on queries and keys: of each head, of the full width, or unit vectors (cosine attention)."""
    found = {_qk_norm(operand, branch) for a in branch.attentions for operand in (a.query, a.key)}
    if found == {"head", "full"}:  # a single head of keys is its full width
        return "head"
    return found.pop() if len(found) == 1 else "none"


def _qk_norm(operand: Value, branch: FoundBranch) -> QKNorm:
    for norm, projection in _passed(operand, branch):
        if norm.kind == "l2norm":
            return "cosine"
        # One head alone is also the full width.
        return "full" if norm.input.shape[-1] == projection.outputs[0].shape[-1] else "head"
    return "none"


def value_normed(branch: FoundBranch) -> bool:
    """True where every attention of the branch norms its values."""
    return bool(branch.attentions) and all(_passed(a.value, branch) for a in branch.attentions)


def _passed(operand: Value, branch: FoundBranch) -> list[tuple[FoundNorm, Op]]:
    """Norms between an attention's operand and the projection that makes it, with that projection."""
    found: list[tuple[FoundNorm, Op]] = []
    stack: list[tuple[Value, FoundNorm | None]] = [(operand, None)]
    seen: set[Value] = set()
    while stack:
        value, passed = stack.pop()
        if value in seen or value.op is None or not value.live:
            continue
        seen.add(value)
        if weight_of(value.op) is not None:
            if passed is not None:
                found.append((passed, value.op))
        elif value.norm is not None and value.norm not in branch.norms_in:
            stack.append((value.norm.input, value.norm))
        else:
            stack.extend((v, passed) for v in value.inputs)
    return found


def inner_norm(branch: FoundBranch) -> bool:
    """True where the last matmul reads a norm other than the entry's (Sub-LN); False for other kinds."""
    if branch.kind == "other" or len(branch.mixers) < 2:
        return False
    last = max(branch.mixers, key=lambda op: op.outputs[0].index)
    norms = (value.behind(SAME).norm for value in last.inputs)
    return any(norm is not None and norm not in branch.norms_in for norm in norms)


def scalar_bias(branch: FoundBranch) -> bool:
    """True where a learnt number is added somewhere in the branch (Fixup)."""
    sums = (v for v in (*branch.region, branch.sum.value) if v.base == "add")
    return any(bias.is_weight and bias.numel == 1 for v in sums for bias in v.inputs)


def divided_by_norm(branch: FoundBranch) -> bool:
    """True where every map of the branch is (γ/σ(W))·W with a learnt γ and a σ made of W (σReparam)."""
    weights = [weight for op in branch.mixers if (weight := weight_of(op)) is not None]
    return bool(weights) and all(map(_is_divided, weights))


def _is_divided(weight: Value) -> bool:
    behind = ancestors([weight], -1)
    leaves = [v for v in behind if v.origin == "parameter"]
    matrices = {v for v in leaves if v.numel == weight.numel}
    if not any(v.numel == 1 for v in leaves if v not in matrices):
        return False
    products = (v for v in behind if v.base in _PRODUCTS)
    return any(not matrices.isdisjoint(ancestors([v], -1)) for v in products)


def entry_scale(branch: FoundBranch) -> float | None:
    """The number that multiplies the norm at the entry before anything reads it."""
    for norm in branch.norms_in:
        for value in norm.output.successors:
            scaled = scale_step(value)
            if scaled is not None and scaled[0] is norm.output and isinstance(scaled[1], float):
                return scaled[1]
    return None
