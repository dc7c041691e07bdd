"""∂(one token out)/∂(the same token in), the other tokens' entries fixed: every singular value.

Of stacks, then of blocks: all of them in a deep budget, the first, the middle and the last one else. A stack
whose attention is not causal is looked at through a short sequence, by one VJP a feature.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from normscope.anatomy import Block, Stack
from normscope.linalg import TangentError, dense, singular_values
from normscope.probes._held import hold
from normscope.probes._one_token import OneToken
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.layers import kernel_of
from normscope.probes.jacobian.look import Look, guarded, site_of
from normscope.probes.jacobian.spectrum import ranked_rows
from normscope.probes.measurement import Measurement

PART = "one token"
VALUES, RANK, CONDITION = (f"jacobian/token-{name}" for name in ("singular-values", "rank", "condition"))

TOKENS = 8
"""Tokens of the short sequence."""

OVERHEAD = 3
"""Forwards besides the VJPs: following the token, running it alone, and one VJP of the whole as a check."""


def token_rows(look: Look) -> Iterator[Measurement]:
    """The spectra of the last token."""
    followed = OneToken(look.model, look.anatomy, look.feed, look.graph)
    for stack in look.anatomy.stacks:
        yield from _rows(look, followed, stack)
    for stack in look.anatomy.stacks:
        for block in _chosen(look, stack):
            yield from _rows(look, followed, block)


def _chosen(look: Look, stack: Stack) -> list[Block]:
    """Every block, or three."""
    if look.spending.budget is Budget.DEEP:
        return list(stack.blocks)
    last = len(stack.blocks) - 1
    return [stack.blocks[i] for i in sorted({0, last // 2, last})]


def _rows(look: Look, followed: OneToken, part: Block | Stack) -> list[Measurement]:
    def measure() -> list[Measurement]:
        width, tokens = _sizes(look, part)
        price = (width / tokens + OVERHEAD) * look.share(part)
        look.spending.require(PART, price + 1, Budget.STANDARD)  # the first follows the whole model once
        before = followed.forwards
        with look.spending.timed(PART):
            try:
                jacobian = followed.block(part) if isinstance(part, Block) else followed.stack(part)
            except TangentError as error:
                if isinstance(part, Block):
                    raise
                return _of_short(look, part, str(error))
            finally:
                look.spending.add(PART, followed.forwards - before)
            values = singular_values(jacobian)
        where = f"the last of {tokens} tokens, keys and values of the others fixed"
        kernel = kernel_of(look, part)
        null = kernel.dimension // tokens if kernel else 0
        return _figures(site_of(part), values, null, f"dense SVD; {where}, {look.conditions}")

    return guarded(look, (VALUES, RANK, CONDITION), site_of(part), measure)


def _figures(site: str, values: np.ndarray, null: int, how: str) -> list[Measurement]:
    ranked = {row.quantity.removeprefix("jacobian/"): row for row in ranked_rows(site, values, null, how)}
    return [
        Measurement(VALUES, site, tuple(map(float, values)), how=how),
        replace(ranked["rank"], quantity=RANK),
        replace(ranked["condition"], quantity=CONDITION),
    ]


def _sizes(look: Look, part: Block | Stack) -> tuple[int, int]:
    """d and T at the end of `part`."""
    blocks = part.blocks if isinstance(part, Stack) else (part,)
    end = look.graph.tensors.get(blocks[-1].exit)
    if end is None:
        raise TangentError("where it ends did not come by")
    return end.shape[-1], end.numel() // end.shape[-1]


def _of_short(look: Look, stack: Stack, obstacle: str) -> list[Measurement]:
    """The same by full VJPs, d of them, of a short sequence."""
    width, tokens = _sizes(look, stack)
    price = (width + 1) * TOKENS / tokens * look.share(stack)
    look.spending.require(PART, price, Budget.STANDARD)
    try:
        graph = hold(look.model, look.anatomy, look.feed.shortened(TOKENS), differences=False)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise TangentError(f"{obstacle}; the model does not take {TOKENS} tokens either") from error
    look.spending.add(PART, price)
    first, last = stack.blocks[0].entry, stack.blocks[-1].exit
    op = graph.operator(first, last)
    d_in, d_out = (graph.tensors[site].shape[-1] for site in (first, last))
    fed = op.shape[1] // d_in
    if fed > TOKENS:
        raise TangentError(f"{obstacle}; {fed} tokens came where {TOKENS} were asked for")
    rows = torch.arange(op.shape[0] - d_out, op.shape[0])
    values = singular_values(dense(op, rows=rows)[:, -d_in:])
    how = f"dense SVD; the last of {fed} tokens, by VJPs of the whole sequence, {look.conditions}"
    return _figures(stack.name, values, 0, how)
