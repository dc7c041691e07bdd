"""Branches: A = ∂(term added)/∂(stream read), norm included: ‖A‖ = σ_max(J_F J_N), and Weyl's bound."""

import math
from collections.abc import Callable, Iterator
from itertools import groupby

from torch import Tensor

from normscope.anatomy import Block, Branch
from normscope.linalg import weyl_lower_bound
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.workspace import (
    FROM_ERRORS,
    MAX_PRODUCTS,
    SET_UP,
    Workspace,
    guarded,
    is_product,
)
from normscope.probes.measurement import Measurement, not_measured

PART = "branches"
NORM, WEYL, BOUND = "jacobian/branch-norm", "jacobian/weyl", "jacobian/lower-bound"


def branch_rows(workspace: Workspace, block: Block) -> Iterator[Measurement]:
    """The derivative's error, ‖A‖ and Weyl's bound of every branch.

    A block with a branch without derivative is refused, because its graph would lack that branch.
    """
    share = workspace.share(block) / max(1, len(block.branches))
    for branch in block.branches:
        yield workspace.derivative_row(PART, branch.site, branch.entry, branch.output, share)
        yield _branch_norm(workspace, branch, share)
        yield _weyl(workspace, branch)
        if branch.site not in workspace.norms and branch.site in workspace.refused:
            reason = f"branch {branch.site}: {workspace.refused[branch.site]}"
            workspace.refused.setdefault(block.site, reason)


def _branch_norm(workspace: Workspace, branch: Branch, share: float) -> Measurement:
    factor = _factor(branch)
    if factor is None:
        reason = "the term is computed, or scaled by a tensor, inside the sum: it is no tensor of its own"
        return not_measured(NORM, branch.site, reason)

    def measure() -> list[Measurement]:
        workspace.spending.require(PART, (MAX_PRODUCTS["part"] + SET_UP) * share, Budget.STANDARD)
        op = workspace.operator(branch.entry, branch.output)
        with workspace.booked(PART, op, share):
            found, how = workspace.sigma_max(op, "part")
        workspace.norms[branch.site] = abs(factor) * found.upper(workspace.bound_confidence)
        return [Measurement(NORM, branch.site, abs(factor) * found.value, how=how)]

    return guarded(workspace, (NORM,), branch.site, measure, decides=True)[0]


def _factor(branch: Branch) -> float | None:
    """Number that the sum multiplies the branch's output with; None where that is not a number."""
    if branch.fused is None:
        return None
    numbers = [factor for factor in branch.fused if isinstance(factor, float)]
    return math.prod(numbers) if len(numbers) == len(branch.fused) else None


def _weyl(workspace: Workspace, branch: Branch) -> Measurement:
    norm = workspace.norms.get(branch.site)
    if norm is None:
        return not_measured(WEYL, branch.site, f"it needs {NORM}")
    if math.isinf(norm):
        return not_measured(WEYL, branch.site, f"the error of {NORM} is unknown")
    alpha = _skip(branch)
    if isinstance(alpha, str):
        return not_measured(WEYL, branch.site, alpha)
    formula = "1 − ‖A‖" if alpha == 1 else f"|α| − ‖A‖, α = {alpha:.4g}"
    how = f"{formula}; {FROM_ERRORS}; {workspace.conditions}"
    return Measurement(WEYL, branch.site, weyl_lower_bound(norm, alpha), how=how)


def _skip(branch: Branch) -> float | str:
    """α, or why it is not one number."""
    if branch.join == "streams":
        return "the bound needs one stream, and the branch is added to several"
    if isinstance(branch.stream_scale, str):
        return "the scale of the stream is learnt: α is not one number"
    return 1.0 if branch.stream_scale is None else branch.stream_scale


def block_bound(workspace: Workspace, block: Block) -> Measurement:
    """Π (|α| − Σ‖A‖) ≤ σ_min of the block, the sum over branches that read the stream side by side."""
    if any(branch.placement == "post" for branch in block.branches):
        how = "exact: a norm on the stream has a kernel, so the bound is zero"
        return Measurement(BOUND, block.site, 0.0, how=how)
    if not block.branches:
        return not_measured(BOUND, block.site, "no branch was read")
    bound, factors = 1.0, []
    for _, abreast in groupby(block.branches, key=lambda branch: branch.entry):
        branches = list(abreast)
        unknown = [branch.site for branch in branches if branch.site not in workspace.norms]
        if unknown:
            return not_measured(BOUND, block.site, f"it needs {NORM} of {unknown[0]}")
        alphas = {_skip(branch) for branch in branches}
        alpha = alphas.pop() if len(alphas) == 1 else 1.0
        if isinstance(alpha, str):
            return not_measured(BOUND, block.site, alpha)
        norms = sum(workspace.norms[branch.site] for branch in branches)
        bound *= max(0.0, weyl_lower_bound(norms, alpha))
        factors.append((branches, alpha))

    def measure() -> list[Measurement]:
        with workspace.spending.fixed(PART, 2 * workspace.share(block), Budget.STANDARD):
            pullbacks = [_pullback(workspace, *each) for each in factors]
            holds = is_product(workspace.graph.operator(block.entry, block.exit), pullbacks)
        if not holds:
            return [not_measured(BOUND, block.site, "the block is not the product of its branches' αI + A")]
        how = f"Π (|α| − ‖A‖) over its branches, a negative factor counts as zero; {FROM_ERRORS}"
        return [Measurement(BOUND, block.site, bound, how=how)]

    return guarded(workspace, (BOUND,), block.site, measure)[0]


def _pullback(workspace: Workspace, branches: list[Branch], alpha: float) -> Callable[[Tensor], Tensor]:
    """u ↦ (αI + ΣA)ᵀu of branches that read the stream side by side."""
    maps = [(_factor(b) or 0.0, workspace.graph.operator(b.entry, b.output)) for b in branches]
    return lambda u: sum((factor * op.rmatvec(u) for factor, op in maps), alpha * u)
