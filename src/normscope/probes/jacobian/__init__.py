"""The jacobian probe: Jacobians of the maps from one state of the stream to another.

    derivative   whether the backward gives the forward's derivative, for branches, blocks and stacks
    branch       A = ∂(term added)/∂(stream read), norm included: ‖A‖ = σ_max(J_F J_N), and Weyl's bound
                 |α| − ‖A‖ ≤ σ_min(αI + A)
    block        σ_max, and a bound of σ_min from the branches' bounds
    stack        from its entry to its last block's exit: gain of random directions, σ_max, bounds
    deep         σ_min, κ, rank, density, the largest few; ∂(one token out)/∂(the same token in)

All are sub-maps of one held graph of one sequence, measured in this order within the budget (`budget.py`); a
part beyond it is a row with that reason.

    one_sequence   which axis counts sequences              held_graph   tensors at sites, one graph over them
    derivative     comparison with finite differences       double       the same in a float64 copy
    workspace      data that all parts share
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from normscope.anatomy import Anatomy, Block, Stack, measuring, read_anatomy
from normscope.probes.jacobian.branches import block_bound, branch_rows
from normscope.probes.jacobian.budget import Budget, Spending
from normscope.probes.jacobian.deep import deep_rows
from normscope.probes.jacobian.derivative import STEPS
from normscope.probes.jacobian.ends import block_rows, bound_rows, stack_rows
from normscope.probes.jacobian.held_graph import hold
from normscope.probes.jacobian.one_sequence import cast, one_sequence
from normscope.probes.jacobian.spectrum import QUANTILES, token_rows
from normscope.probes.jacobian.workspace import CONFIDENCE, DERIVATIVE, Workspace
from normscope.probes.measurement import Measurement
from normscope.subjects import Subject, untouched

__all__ = ["CONFIDENCE", "DERIVATIVE", "QUANTILES", "Budget", "Spending", "measure_jacobian"]

HOLDING = "the graph"  # one forward, and two a stack and step for finite differences


def measure_jacobian(
    subject: Subject, anatomy: Anatomy, spending: Spending | None = None
) -> Iterator[Measurement]:
    """Jacobian figures of every branch, block and stack of `anatomy`; `spending` is standard by default.

    Eval mode, math attention, one sequence (B = 1), float32: a half-precision model is measured in a float32
    copy. The model is restored. A missing figure has its reason. Rows are yielded as they are measured, so an
    interrupted check keeps them.
    """
    if not anatomy.stacks:
        return
    spending = spending or Spending()
    subject, anatomy, precision = _in_float32(subject, anatomy)
    with untouched(subject.model), measuring(subject.model):
        with spending.timed(HOLDING):
            feed = one_sequence(subject.model, subject.batch, anatomy)
            graph = hold(subject.model, anatomy, feed)
        spending.add(HOLDING, 1 + 2 * len(STEPS) * len(anatomy.stacks))
        conditions = f"{graph.note}, eval mode, math attention{precision}"
        yield from _rows(Workspace(subject.model, anatomy, feed, graph, conditions, spending))


def _rows(workspace: Workspace) -> Iterator[Measurement]:
    """Part by part over the whole model, in the order of the budget."""
    stacks, blocks = workspace.anatomy.stacks, workspace.anatomy.blocks
    bounds = []
    for block in blocks:
        yield from branch_rows(workspace, block)
        bounds.append(block_bound(workspace, block))
        yield bounds[-1]
    for block in blocks:
        yield from block_rows(workspace, block)
    for stack in stacks:
        yield from stack_rows(workspace, stack)
    for stack in stacks:
        yield from bound_rows(workspace, stack, bounds)
    parts: list[Block | Stack] = [*stacks, *blocks]
    for part in parts:
        yield from token_rows(workspace, part)
    for part in parts:
        yield from deep_rows(workspace, part)


def _in_float32(subject: Subject, anatomy: Anatomy) -> tuple[Subject, Anatomy, str]:
    """The subject, or a float32 copy of a half-precision one, read again because its ops have no casts."""
    half = {p.dtype for p in subject.model.parameters()} & {torch.float16, torch.bfloat16}
    if not half:
        return subject, anatomy, ""
    model = copy.deepcopy(subject.model).float()
    twin = replace(subject, model=model, batch=cast(subject.batch, torch.float32))
    return twin, read_anatomy(twin), ", in a float32 copy"
