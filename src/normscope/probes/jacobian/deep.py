"""Whole spectra of small maps; both ends and the density of large ones. Needs the deep budget."""

import math

import numpy as np

from normscope.anatomy import Block, Stack
from normscope.linalg import (
    Estimate,
    LogDensity,
    SigmaMin,
    Status,
    TangentError,
    TokenProjector,
    joint_confidence,
    layerwise_sigma_min,
    log_density,
    sigma_min,
    top_singular,
)
from normscope.linalg.golub_kahan import CONFIDENCE as ENDS_CONFIDENCE
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.layers import kernel_of, layers_of
from normscope.probes.jacobian.spectrum import (
    BATCHED,
    LARGEST_FEW,
    NUM_TOP,
    QUANTILES,
    RANK_TOLERANCE,
    whole_rows,
)
from normscope.probes.jacobian.workspace import CONFIDENCE, Workspace, guarded, site_of
from normscope.probes.measurement import Measurement, not_measured

SMALLEST, DENSITY, TOP = "smallest values", "density", "top values"
SMALL_END = ("jacobian/sigma-min", "jacobian/sigma-min-nonzero", "jacobian/condition", "jacobian/rank")
SHAPE = ("jacobian/effective-rank", "jacobian/stable-rank", "jacobian/log-sigma")

DENSE_LIMIT = 2048  # largest T·d whose Jacobian is computed densely

TOP_PRODUCTS = 160
DIRECT_PRODUCTS = 150
"""Golub–Kahan–Lanczos products on the map itself: enough for κ up to about 15; a larger κ needs solves."""
LAYER_PRODUCTS = 300
PROBES, STEPS = 4, {"block": 16, "stack": 32}
TOLERANCE = 5e-2
LEAST = 1e-9  # used in place of quantile 0, to give the least singular value seen


def deep_rows(workspace: Workspace, part: Block | Stack) -> list[Measurement]:
    """The ends, rank, κ and density of a block's or stack's Jacobian."""
    site, op_shape = site_of(part), _shape(workspace, part)
    if max(op_shape) <= DENSE_LIMIT:
        price = BATCHED * max(op_shape) * workspace.share(part)
        if price <= workspace.spending.left or workspace.spending.budget is not Budget.DEEP:
            every = (*SMALL_END, *SHAPE, LARGEST_FEW)
            return guarded(workspace, every, site, lambda: whole_rows(workspace, part, price))
    rows = guarded(workspace, SMALL_END, site, lambda: _small_end(workspace, part))
    rows += guarded(workspace, SHAPE, site, lambda: _density(workspace, part))
    if isinstance(part, Stack):
        rows += guarded(workspace, (LARGEST_FEW,), site, lambda: _top(workspace, part))
    return rows


def _shape(workspace: Workspace, part: Block | Stack) -> tuple[int, int]:
    """Shape of its Jacobian; (0, 0) where it has none."""
    try:
        return workspace.ends(part).shape
    except TangentError:
        return 0, 0


def _small_end(workspace: Workspace, part: Block | Stack) -> list[Measurement]:
    """The small end, by Golub–Kahan–Lanczos for a block, else by solves with its layers."""
    share = workspace.share(part)
    workspace.spending.require(SMALLEST, (DIRECT_PRODUCTS + LAYER_PRODUCTS) * share, Budget.DEEP)
    with workspace.spending.timed(SMALLEST):
        layers = layers_of(workspace, part)
        kernel = layers[-1].left_kernel
        found, method = None, "Golub–Kahan–Lanczos"
        if isinstance(part, Block):
            op = workspace.ends(part)
            with workspace.booked(SMALLEST, op, share):
                found = sigma_min(op, left_kernel=kernel, tol=TOLERANCE, max_products=DIRECT_PRODUCTS)
        if found is None or found.status is Status.NOT_CONVERGED:
            found = layerwise_sigma_min(layers, tol=TOLERANCE, max_products=LAYER_PRODUCTS)
            workspace.spending.add(SMALLEST, found.products * share)
            method = f"inverse of {len(layers)} layers"
    return _small_rows(workspace, part, kernel, found, method)


def _small_rows(
    workspace: Workspace, part: Block | Stack, kernel: object, found: SigmaMin, method: str
) -> list[Measurement]:
    site, n = site_of(part), workspace.ends(part).shape[1]
    if found.status is Status.NOT_CONVERGED:
        reason = f"{method} did not converge in {found.products:.0f} products"
        reason += f": {found.note}" if found.note else ""
        return [not_measured(quantity, site, reason) for quantity in SMALL_END]
    error = f"relative error ≤ {found.error:.1g} ({ENDS_CONFIDENCE:.1%} confidence)"
    error = f"{found.status}, {error}, residual {found.residual:.1g}"
    how = f"{method}, {error}, {found.products:.0f} products; {workspace.conditions}"
    null = kernel.dimension if isinstance(kernel, TokenProjector) else 0
    of_kernel = f"{null} directions are a norm's kernel, of gain ≤ {found.kernel_gain:.1g}"
    rows = [Measurement("jacobian/sigma-min-nonzero", site, found.value, how=how)]
    if null:
        rows.append(Measurement("jacobian/sigma-min", site, 0.0, how=of_kernel))
    else:
        rows.append(Measurement("jacobian/sigma-min", site, found.value, how=how))
    if site not in workspace.largest:
        reason = "it needs jacobian/sigma-max"
        return [*rows, *(not_measured(f"jacobian/{name}", site, reason) for name in ("condition", "rank"))]
    condition = workspace.largest[site] / found.value
    together = joint_confidence([CONFIDENCE["stack" if isinstance(part, Stack) else "part"], ENDS_CONFIDENCE])
    both = (
        f"relative error ≤ {condition_error(workspace.errors[site], found.error):.1g}: σ_max and σ_min "
        f"({together:.0%} confidence); {how}"
    )
    rows.append(Measurement("jacobian/condition", site, condition, how=both))
    if condition * RANK_TOLERANCE >= 1:
        reason = f"σ_max/σ reaches {condition:.1g} outside the kernel: no gap at {RANK_TOLERANCE:g}"
        return [*rows, not_measured("jacobian/rank", site, reason)]
    ranked = f"{n} less a kernel of {null}; σ > {RANK_TOLERANCE:g} σ₁ on the rest"
    return [*rows, Measurement("jacobian/rank", site, float(n - null), how=f"{ranked}; {how}")]


def condition_error(of_largest: float, of_smallest: float) -> float:
    """Relative error of κ = σ_max/σ_min. κ is underestimated: σ_max from below, σ_min from above."""
    return (1 + of_largest) / (1 - of_smallest) - 1 if of_smallest < 1 else math.inf


def _density(workspace: Workspace, part: Block | Stack) -> list[Measurement]:
    steps = STEPS["stack" if isinstance(part, Stack) else "block"]
    share = workspace.share(part)
    workspace.spending.require(DENSITY, (2 * (PROBES + 1) * steps + 2) * share, Budget.DEEP)
    op, kernel = workspace.ends(part), kernel_of(workspace, part)
    with workspace.booked(DENSITY, op, share):
        found = log_density(op, num_probes=PROBES, steps=steps, left_kernel=kernel)
    null = 0 if kernel is None else kernel.dimension / op.shape[0]
    return _density_rows(site_of(part), null, found, workspace)


def _density_rows(site: str, null: float, found: LogDensity, workspace: Workspace) -> list[Measurement]:
    """Rows of a density; `null` is the share of directions in a norm's known kernel."""
    made = f"stochastic Lanczos quadrature, {PROBES} probes, {found.products} products"
    made = f"{made}; {workspace.conditions}"
    rows = [
        _estimated("jacobian/effective-rank", site, found.effective_rank, made),
        _estimated("jacobian/stable-rank", site, found.stable_rank, made),
    ]
    if not math.isfinite(found.distance.error):
        reason = f"the probes do not see the end of the spectrum in {found.products} products"
        return [*rows, not_measured("jacobian/log-sigma", site, reason, "log10")]
    rest = [(share - null) / (1 - null) for share in QUANTILES]
    logs = [found.quantile(max(s, LEAST)) if s > 0 or not null else -math.inf for s in rest]
    quantiles = tuple(each / math.log(10) for each in logs)
    error = f"{found.status}, W₁ ≤ {found.distance.error / math.log(10):.2g} (95 % confidence)"
    return [*rows, Measurement("jacobian/log-sigma", site, quantiles, "log10", f"quantiles; {error}; {made}")]


def _estimated(quantity: str, site: str, found: Estimate, made: str) -> Measurement:
    if not math.isfinite(found.error) or found.error > found.value:
        return not_measured(quantity, site, f"its error exceeds its value after {made}")
    return Measurement(quantity, site, found.value, how=f"± {found.error:.2g} (95 % confidence); {made}")


def _top(workspace: Workspace, stack: Stack) -> list[Measurement]:
    share = workspace.share(stack)
    workspace.spending.require(TOP, (TOP_PRODUCTS + 1) * share, Budget.DEEP)
    op = workspace.ends(stack)
    with workspace.booked(TOP, op, share):
        found = top_singular(op, min(NUM_TOP, *op.shape), max_products=TOP_PRODUCTS)
    sure = found.values[np.isfinite(found.errors)]
    if not len(sure):
        return [not_measured(LARGEST_FEW, stack.name, f"not converged in {found.products} products")]
    error = f"{found.status}, relative error ≤ {float(found.errors[: len(sure)].max()):.1g}"
    error += f" ({ENDS_CONFIDENCE:.1%} confidence)"
    how = f"iterative, {error}, {found.products} products; {workspace.conditions}"
    return [Measurement(LARGEST_FEW, stack.name, tuple(map(float, sure)), how=how)]
