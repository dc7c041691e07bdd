"""Blocks and stacks as maps from end to end: σ_max, random directions, the whole spectrum of small blocks."""

import math
from collections.abc import Iterable, Iterator

from normscope.anatomy import Block, Stack
from normscope.linalg import (
    JacobianOperator,
    dense,
    product_log_lower_bound,
    product_log_upper_bound,
    singular_values,
)
from normscope.probes.jacobian.branches import BOUND
from normscope.probes.jacobian.budget import Budget, OverBudget
from normscope.probes.jacobian.layers import kernel_of
from normscope.probes.jacobian.look import (
    FROM_ERRORS,
    MAX_PRODUCTS,
    SET_UP,
    Look,
    compared,
    drawn,
    guarded,
    site_of,
)
from normscope.probes.jacobian.spectrum import spectrum_rows
from normscope.probes.measurement import Measurement, not_measured

BLOCKS, STACKS, WHOLE = "blocks", "stacks", "whole spectra"
LARGEST, DIMENSION, CONTRACTION = "jacobian/sigma-max", "jacobian/dimension", "jacobian/contraction"
ABOVE, BELOW = "jacobian/log-upper-bound", "jacobian/log-lower-bound"

DENSE_LIMIT = {Budget.FAST: 0, Budget.STANDARD: 512, Budget.DEEP: 2048}
"""Largest T·d whose Jacobian is taken whole."""

BATCHED = 0.5
"""What a VJP among many at once costs of a forward, with its share of the SVD; measured at T·d = 512: 0.4."""

NUM_DIRECTIONS = 4
"""Random directions for the contraction."""


def block_rows(look: Look, block: Block) -> list[Measurement]:
    """σ_max and dimension; the whole spectrum where the block is small and the budget has it."""

    def measure() -> list[Measurement]:
        op = look.ends(block)
        rows = _whole(look, block, op) or _largest(look, block, op)
        look.largest[block.site] = float(rows[0].value)  # type: ignore[arg-type]
        return [*rows, Measurement(DIMENSION, block.site, float(op.shape[1]))]

    return guarded(look, (LARGEST, DIMENSION), block.site, measure, decides=True)


def _largest(look: Look, block: Block, op: JacobianOperator) -> list[Measurement]:
    share = look.share(block)
    look.spending.require(BLOCKS, (MAX_PRODUCTS["part"] + SET_UP + 1) * share)
    with look.booked(BLOCKS, op, share):
        was = compared(look.graph.check_tangent(op, block.entry, block.exit))
        found, how = look.sigma_max(op, "part")
    look.upper[block.site] = found.upper(look.bound_confidence)
    return [Measurement(LARGEST, block.site, found.value, how=how + was)]


def _whole(look: Look, part: Block | Stack, op: JacobianOperator) -> list[Measurement]:
    """σ_max and all the rest; nothing where that is not to be had."""
    price = BATCHED * max(op.shape) * look.share(part)
    if max(op.shape) > DENSE_LIMIT[look.spending.budget]:
        return []
    try:
        look.spending.require(WHOLE, price, Budget.STANDARD)
    except OverBudget:
        return []
    with look.spending.timed(WHOLE):
        was = "" if isinstance(part, Stack) else compared(look.graph.check_tangent(op, part.entry, part.exit))
        values = singular_values(dense(op))
        look.spending.add(WHOLE, price)
        look.whole.add(site_of(part))
    how = f"dense SVD; {look.conditions}{was}"
    look.upper[site_of(part)] = float(values[0])
    largest = Measurement(LARGEST, site_of(part), float(values[0]), how=how)
    kernel = kernel_of(look, part)
    return [largest, *spectrum_rows(site_of(part), values, kernel.dimension if kernel else 0, how)]


def stack_rows(look: Look, stack: Stack) -> list[Measurement]:
    """σ_max from the stack's entry to its last block's exit, and the gain of random directions; the whole
    spectrum where the stack is small."""
    broken = next((block.site for block in stack.blocks if block.site in look.refused), None)
    if broken is not None:
        reason = look.refused[broken]
        look.refused[stack.name] = reason if reason.startswith("branch") else f"{broken}: {reason}"

    def measure() -> list[Measurement]:
        share = look.share(stack)
        look.spending.require(STACKS, (MAX_PRODUCTS["stack"] + SET_UP + NUM_DIRECTIONS) * share)
        op = look.ends(stack)
        with look.booked(STACKS, op, share):
            found, how = look.sigma_max(op, "stack")
            look.largest[stack.name] = found.value
            contraction = _contraction(look, op, stack.name)
        whole = _whole(look, stack, op) or [Measurement(LARGEST, stack.name, found.value, how=how)]
        return [*whole, contraction]

    return guarded(look, (LARGEST, CONTRACTION), stack.name, measure, decides=True)


def _contraction(look: Look, op: JacobianOperator, site: str) -> Measurement:
    """log₁₀ √(mean ‖Jv‖²/‖v‖²): 0 where a random direction keeps its length."""
    directions = drawn(op, NUM_DIRECTIONS, op.shape[1])
    gains = [float(op.matvec(v).double().square().sum() / v.double().square().sum()) for v in directions]
    mean = sum(gains) / len(gains)
    if mean == 0:
        return not_measured(CONTRACTION, site, "random directions vanish in float32", "log10")
    how = f"mean over {NUM_DIRECTIONS} random directions; {look.conditions}"
    return Measurement(CONTRACTION, site, 0.5 * math.log10(mean), "log10", how)


def bound_rows(look: Look, stack: Stack, rows: Iterable[Measurement]) -> Iterator[Measurement]:
    """Bounds of the stack's ends by those of its blocks: Π of upper bounds of the blocks' σ_max is above its
    σ_max, Π of their `jacobian/lower-bound`, found in `rows`, under σ_min."""
    lower = {row.site: row.value for row in rows if row.quantity == BOUND and isinstance(row.value, float)}
    for quantity, of_blocks, known in ((ABOVE, LARGEST, look.upper), (BELOW, BOUND, lower)):
        missing = next((block.site for block in stack.blocks if block.site not in known), None)
        if missing is not None:
            yield not_measured(quantity, stack.name, f"it needs {of_blocks} of {missing}", "log10")
        else:
            values = [known[block.site] for block in stack.blocks]
            if math.inf in values:
                yield not_measured(quantity, stack.name, f"the error of {of_blocks} is not known", "log10")
                continue
            bound = product_log_upper_bound(values) if quantity == ABOVE else product_log_lower_bound(values)
            how = f"Π {of_blocks} of its blocks; {FROM_ERRORS}"
            yield Measurement(quantity, stack.name, bound / math.log(10), "log10", how)
