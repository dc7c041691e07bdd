"""Figures of whole blocks and stacks: the derivative's error, σ_max, gain of random directions, bounds."""

import math
from collections.abc import Iterable, Iterator

from normscope.anatomy import Block, Stack
from normscope.linalg import product_log_lower_bound, product_log_upper_bound
from normscope.probes.jacobian.branches import BOUND
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.workspace import (
    FROM_ERRORS,
    MAX_PRODUCTS,
    SET_UP,
    Workspace,
    drawn,
    ends_of,
    fits,
    guarded,
    is_product,
    site_of,
)
from normscope.probes.measurement import Measurement, not_measured

BLOCKS, STACKS, BOUNDS = "blocks", "stacks", "bounds"
LARGEST, DIMENSION, CONTRACTION = "jacobian/sigma-max", "jacobian/dimension", "jacobian/contraction"
ABOVE, BELOW = "jacobian/log-upper-bound", "jacobian/log-lower-bound"

NUM_DIRECTIONS = 4  # random directions for the contraction

CONTRACTION_CONFIDENCE = 0.95


def block_rows(workspace: Workspace, block: Block) -> Iterator[Measurement]:
    """The derivative's error, σ_max and dimension of a block."""
    yield workspace.derivative_row(BLOCKS, block.site, *ends_of(block), workspace.share(block))

    def dimension() -> list[Measurement]:
        return [Measurement(DIMENSION, block.site, float(workspace.ends(block).shape[1]))]

    yield from guarded(workspace, (DIMENSION,), block.site, dimension, decides=True)
    yield from _largest(workspace, block, BLOCKS, "part")


def stack_rows(workspace: Workspace, stack: Stack) -> Iterator[Measurement]:
    """The derivative's error, gain of random directions and σ_max, from a stack's entry to its last exit."""
    broken = next((block.site for block in stack.blocks if block.site in workspace.refused), None)
    if broken is not None:
        reason = workspace.refused[broken]
        workspace.refused[stack.name] = reason if reason.startswith("branch") else f"{broken}: {reason}"
    yield workspace.derivative_row(STACKS, stack.name, *ends_of(stack), workspace.share(stack))
    yield _contraction(workspace, stack)
    yield from _largest(workspace, stack, STACKS, "stack")


def _largest(workspace: Workspace, part: Block | Stack, name: str, kind: str) -> list[Measurement]:
    site, share = site_of(part), workspace.share(part)

    def measure() -> list[Measurement]:
        workspace.spending.require(name, (MAX_PRODUCTS[kind] + SET_UP) * share, Budget.STANDARD)
        op = workspace.ends(part)
        with workspace.booked(name, op, share):
            found, how = workspace.sigma_max(op, kind)
        workspace.largest[site], workspace.errors[site] = found.value, found.error
        workspace.upper[site] = found.upper(workspace.bound_confidence)
        return [Measurement(LARGEST, site, found.value, how=how)]

    return guarded(workspace, (LARGEST,), site, measure, decides=True)


def _contraction(workspace: Workspace, stack: Stack) -> Measurement:
    """log₁₀ √(mean ‖Jv‖²/‖v‖²): 0 where a random direction keeps its length."""

    def measure() -> list[Measurement]:
        share = workspace.share(stack)
        workspace.spending.require(STACKS, (NUM_DIRECTIONS + SET_UP) * share)
        op = workspace.ends(stack)
        with workspace.booked(STACKS, op, share):
            directions = drawn(op, NUM_DIRECTIONS, op.shape[1])
            gains = [op.matvec(v).double().square().sum() / v.double().square().sum() for v in directions]
        mean = float(sum(gains)) / NUM_DIRECTIONS
        if mean == 0:
            return [not_measured(CONTRACTION, stack.name, "random directions vanish in float32", "log10")]
        low, high = contraction_error()
        how = (
            f"mean over {NUM_DIRECTIONS} random directions, error {low:+.2f} … {high:+.2f} "
            f"({CONTRACTION_CONFIDENCE:.0%} confidence, whatever the spectrum); {workspace.conditions}"
        )
        return [Measurement(CONTRACTION, stack.name, 0.5 * math.log10(mean), "log10", how)]

    return guarded(workspace, (CONTRACTION,), stack.name, measure, decides=True)[0]


def contraction_error() -> tuple[float, float]:
    """Interval of log₁₀ √(‖J‖_F²/n) about its estimate, in decades.

    k random directions give Σ σ_i² χ²_k/k. It spreads the most where J has rank one, so the quantiles of
    χ²_k/k give an interval for every spectrum.
    """
    from scipy.special import gammaincinv  # imported late: it is slow to import

    tail = (1 - CONTRACTION_CONFIDENCE) / 2
    low, high = (2 * float(gammaincinv(NUM_DIRECTIONS / 2, p)) / NUM_DIRECTIONS for p in (1 - tail, tail))
    return -0.5 * math.log10(low), -0.5 * math.log10(high)


def bound_rows(workspace: Workspace, stack: Stack, rows: Iterable[Measurement]) -> Iterator[Measurement]:
    """Bounds of the stack's σ_max and σ_min: Π of its blocks' upper bounds of σ_max, and Π of their
    `jacobian/lower-bound`, found in `rows`."""
    lower = {row.site: row.value for row in rows if row.quantity == BOUND and isinstance(row.value, float)}
    chain = guarded(workspace, (ABOVE,), stack.name, lambda: _chain(workspace, stack))
    for quantity, of_blocks, known in ((ABOVE, LARGEST, workspace.upper), (BELOW, BOUND, lower)):
        missing = next((block.site for block in stack.blocks if block.site not in known), None)
        values = [known.get(block.site, math.inf) for block in stack.blocks]
        if missing is not None:
            yield not_measured(quantity, stack.name, f"it needs {of_blocks} of {missing}", "log10")
        elif math.inf in values:
            yield not_measured(quantity, stack.name, f"the error of {of_blocks} is unknown", "log10")
        elif chain:
            yield not_measured(quantity, stack.name, chain[0].how.removeprefix("not measured: "), "log10")
        else:
            bound = product_log_upper_bound(values) if quantity == ABOVE else product_log_lower_bound(values)
            how = f"Π {of_blocks} of its blocks; {FROM_ERRORS}"
            yield Measurement(quantity, stack.name, bound / math.log(10), "log10", how)


def _chain(workspace: Workspace, stack: Stack) -> list[Measurement]:
    """Empty where the stack's Jacobian is the product of its blocks', else a row with that reason."""
    with workspace.spending.fixed(BOUNDS, 2 * workspace.share(stack), Budget.STANDARD):
        whole, maps = workspace.ends(stack), [workspace.graph.operator(b.entry, b.exit) for b in stack.blocks]
        holds = fits(whole, maps) and is_product(whole, [each.rmatvec for each in maps])
    return [] if holds else [not_measured(ABOVE, stack.name, "the stack is not the product of its blocks")]
