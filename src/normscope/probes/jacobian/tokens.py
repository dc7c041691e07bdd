"""∂(one token out)/∂(the same token in), the other tokens' entries fixed: every singular value."""

import torch

from normscope.anatomy import Stack
from normscope.linalg import TangentError, dense, singular_values
from normscope.probes._held import hold
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.look import Look, guarded
from normscope.probes.measurement import Measurement

PART = "one token"
QUANTITY = "jacobian/token-singular-values"

TOKENS = 8
"""Tokens of the short sequence through which a stack that is not causal is looked at, by d VJPs."""


def token_rows(look: Look) -> list[Measurement]:
    """The spectrum of one token through every stack."""
    return [row for stack in look.anatomy.stacks for row in _stack_row(look, stack)]


def _stack_row(look: Look, stack: Stack) -> list[Measurement]:
    def measure() -> list[Measurement]:
        last = stack.blocks[-1].exit
        width = look.graph.tensors[last].shape[-1]
        look.spending.require(PART, _short_price(look, stack, width), Budget.STANDARD)
        with look.spending.timed(PART):
            values, how = _of_short(look, stack)
        look.spending.add(PART, _short_price(look, stack, width))
        return [Measurement(QUANTITY, stack.name, values, how=how)]

    return guarded(look, (QUANTITY,), stack.name, measure)


def _short_price(look: Look, stack: Stack, width: int) -> float:
    tokens = look.graph.tensors[stack.blocks[0].entry].numel() // width
    return width * TOKENS / tokens * look.share(stack)


def _of_short(look: Look, stack: Stack) -> tuple[tuple[float, ...], str]:
    try:
        graph = hold(look.model, look.anatomy, look.feed.shortened(TOKENS), differences=False)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise TangentError(f"the model does not take {TOKENS} tokens ({type(error).__name__})") from error
    first, last = stack.blocks[0].entry, stack.blocks[-1].exit
    op = graph.operator(first, last)
    d_in, d_out = (graph.tensors[site].shape[-1] for site in (first, last))
    fed = op.shape[1] // d_in
    if fed > TOKENS:
        raise TangentError(f"its cost goes with the tokens, and {fed} came where {TOKENS} were asked for")
    rows = torch.arange(op.shape[0] - d_out, op.shape[0])
    values = singular_values(dense(op, rows=rows)[:, -d_in:])
    return tuple(map(float, values)), f"dense SVD; last of {fed} tokens, {look.conditions}"
