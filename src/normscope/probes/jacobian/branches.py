"""Branches: A = ∂(term added)/∂(stream read), norm included: ‖A‖ = σ_max(J_F J_N), and Weyl's bound."""

import math
from collections.abc import Iterator
from itertools import groupby

from normscope.anatomy import Block, Branch
from normscope.linalg import weyl_lower_bound
from normscope.probes.jacobian.look import FROM_ERRORS, MAX_PRODUCTS, SET_UP, Look, compared, guarded
from normscope.probes.measurement import Measurement, not_measured

PART = "branches"
NORM, WEYL, BOUND = "jacobian/branch-norm", "jacobian/weyl", "jacobian/lower-bound"


def branch_rows(look: Look, block: Block) -> Iterator[Measurement]:
    """‖A‖ and Weyl's bound of every branch; and what the two bounds together say of the block.

    A block with a branch that has no derivative is refused: its graph would lack that branch.
    """
    for branch in block.branches:
        yield _branch_norm(look, block, branch)
        yield _weyl(look, branch)
        if branch.site not in look.norms and branch.site in look.refused:
            look.refused.setdefault(block.site, f"branch {branch.site}: {look.refused[branch.site]}")
    yield _block_bound(look, block)


def _branch_norm(look: Look, block: Block, branch: Branch) -> Measurement:
    factor = _factor(branch)
    if factor is None:
        reason = "the term is made, or scaled by a tensor, inside the sum: it is no tensor of its own"
        return not_measured(NORM, branch.site, reason)
    share = look.share(block) / len(block.branches)

    def measure() -> list[Measurement]:
        look.spending.require(PART, (MAX_PRODUCTS["part"] + SET_UP + 1) * share)
        op = look.graph.operator(branch.entry, branch.output)
        with look.booked(PART, op, share):
            found, how = look.sigma_max(op, "part")
            how += compared(look.graph.check_tangent(op, branch.entry, branch.output))
        look.norms[branch.site] = factor * found.upper(look.bound_confidence)
        return [Measurement(NORM, branch.site, factor * found.value, how=how)]

    return guarded(look, (NORM,), branch.site, measure, decides=True)[0]


def _factor(branch: Branch) -> float | None:
    """What the sum multiplies the branch's output with, in size; None where that is no number."""
    if branch.fused is None:
        return None
    numbers = [factor for factor in branch.fused if isinstance(factor, float)]
    return abs(math.prod(numbers)) if len(numbers) == len(branch.fused) else None


def _weyl(look: Look, branch: Branch) -> Measurement:
    norm = look.norms.get(branch.site)
    if norm is None:
        return not_measured(WEYL, branch.site, "it needs jacobian/branch-norm")
    if math.isinf(norm):
        return not_measured(WEYL, branch.site, "the error of jacobian/branch-norm is not known")
    alpha = _skip(branch)
    if isinstance(alpha, str):
        return not_measured(WEYL, branch.site, alpha)
    formula = "1 − ‖A‖" if alpha == 1 else f"|α| − ‖A‖, α = {alpha:.4g}"
    how = f"{formula}; {FROM_ERRORS}; {look.conditions}"
    return Measurement(WEYL, branch.site, weyl_lower_bound(norm, alpha), how=how)


def _skip(branch: Branch) -> float | str:
    """α, or why it is not one number."""
    if branch.join == "streams":
        return "it is for one stream, and the branch is added to several"
    if isinstance(branch.stream_scale, str):
        return "what scales the stream is learnt: α is not one number"
    return 1.0 if branch.stream_scale is None else branch.stream_scale


def _block_bound(look: Look, block: Block) -> Measurement:
    """Π (|α| − Σ‖A‖) ≤ σ_min of the block, the sum over branches that read the stream side by side."""
    if any(branch.placement == "post" for branch in block.branches):
        how = "exact: a norm on the stream has a kernel, and no bound is above zero"
        return Measurement(BOUND, block.site, 0.0, how=how)
    bound = 1.0 if block.branches else math.nan
    for _, abreast in groupby(block.branches, key=lambda branch: branch.entry):
        branches = list(abreast)
        alphas = {_skip(branch) for branch in branches}
        unknown = [branch.site for branch in branches if branch.site not in look.norms]
        if unknown:
            return not_measured(BOUND, block.site, f"it needs jacobian/branch-norm of {unknown[0]}")
        alpha = alphas.pop() if len(alphas) == 1 else 1.0
        if isinstance(alpha, str):
            return not_measured(BOUND, block.site, alpha)
        bound *= max(0.0, weyl_lower_bound(sum(look.norms[branch.site] for branch in branches), alpha))
    if math.isnan(bound):
        return not_measured(BOUND, block.site, "no branch was read")
    how = f"Π (|α| − ‖A‖) over its branches, zero where one is under it; {FROM_ERRORS}"
    return Measurement(BOUND, block.site, bound, how=how)
