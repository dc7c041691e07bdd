"""The jacobian probe: how the map from one state of the stream to another treats directions.

    branch   A = ∂(term added)/∂(stream read), norm included: ‖A‖ = σ_max(J_F J_N), and Weyl's bound
             |α| − ‖A‖ ≤ σ_min(αI + A)
    block    σ_max, and what the branches' bounds say of σ_min; the whole spectrum where it is small
    stack    from its entry to its last block's exit: σ_max, gain of random directions, bounds
    token    ∂(one token out)/∂(the same token in): every singular value, of stacks and blocks
    deep     σ_min, κ, rank, density, the largest few, of large blocks and stacks

All but the tokens are sub-maps of one held graph of one sequence. What is measured, in this order, is what
the budget affords (`budget.py`); a part that it does not is a row that says so.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from normscope.anatomy import Anatomy, Block, Stack, measuring, read_anatomy
from normscope.probes._feeding import cast, one_sequence
from normscope.probes._held import hold
from normscope.probes.jacobian.branches import branch_rows
from normscope.probes.jacobian.budget import Budget, Spending
from normscope.probes.jacobian.deep import deep_rows
from normscope.probes.jacobian.ends import block_rows, bound_rows, stack_rows
from normscope.probes.jacobian.look import CONFIDENCE, Look
from normscope.probes.jacobian.spectrum import QUANTILES
from normscope.probes.jacobian.tokens import token_rows
from normscope.probes.measurement import Measurement
from normscope.subjects import Subject, untouched

__all__ = ["CONFIDENCE", "QUANTILES", "Budget", "Spending", "measure_jacobian"]

HOLDING = "the graph"
"""One forward, and two a stack for finite differences."""


def measure_jacobian(
    subject: Subject, anatomy: Anatomy, spending: Spending | None = None
) -> Iterator[Measurement]:
    """Jacobian figures of every branch, block and stack of `anatomy`.

    Eval mode, math attention, one sequence (B = 1), float32: a half-precision model is measured in a float32
    copy. The model comes back as it was. What has no figure says why. Rows come as they are measured, so that
    an interrupted check keeps those that it has.

    Args:
        subject, anatomy: the model and its reading.
        spending: the account to spend from; by default a new one of the standard budget.
    """
    if not anatomy.stacks:
        return
    spending = spending or Spending()
    subject, anatomy, precision = _in_float32(subject, anatomy)
    with untouched(subject.model), measuring(subject.model):
        with spending.timed(HOLDING):
            feed = one_sequence(subject.model, subject.batch, anatomy)
            graph = hold(subject.model, anatomy, feed)
        spending.add(HOLDING, 1 + 2 * len(anatomy.stacks))
        conditions = f"{graph.note}, eval mode, math attention{precision}"
        yield from _rows(Look(subject.model, anatomy, feed, graph, conditions, spending))


def _rows(look: Look) -> Iterator[Measurement]:
    """Part by part over the whole model: what comes last is what the budget may leave out."""
    stacks, blocks = look.anatomy.stacks, look.anatomy.blocks
    of_branches = []
    for block in blocks:
        for row in branch_rows(look, block):
            of_branches.append(row)
            yield row
    for block in blocks:
        yield from block_rows(look, block)
    for stack in stacks:
        yield from stack_rows(look, stack)
    for stack in stacks:
        yield from bound_rows(look, stack, of_branches)
    yield from token_rows(look)
    parts: list[Block | Stack] = [*stacks, *blocks]
    for part in parts:
        yield from deep_rows(look, part)


def _in_float32(subject: Subject, anatomy: Anatomy) -> tuple[Subject, Anatomy, str]:
    """The subject itself, or a float32 copy of a half-precision one, read anew: casts are gone from
    its ops."""
    half = {p.dtype for p in subject.model.parameters()} & {torch.float16, torch.bfloat16}
    if not half:
        return subject, anatomy, ""
    model = copy.deepcopy(subject.model).float()
    twin = replace(subject, model=model, batch=cast(subject.batch, torch.float32))
    return twin, read_anatomy(twin), ", in a float32 copy"
