"""∂(one token out)/∂(the same token in), the other tokens' entries fixed: every singular value."""

from dataclasses import replace

from normscope.anatomy import Block, Stack
from normscope.linalg import TangentError, restricted_jacobian, singular_values, token_indices
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.layers import kernel_of
from normscope.probes.jacobian.spectrum import BATCHED, ranked_rows
from normscope.probes.jacobian.workspace import Workspace, ends_of, guarded, site_of
from normscope.probes.measurement import Measurement

PART = "one token"
VALUES, RANK, CONDITION = (f"jacobian/token-{name}" for name in ("singular-values", "rank", "condition"))


def token_rows(workspace: Workspace, part: Block | Stack) -> list[Measurement]:
    """The spectrum of the last token of a block or a stack, by batched VJPs of the whole sequence."""

    def measure() -> list[Measurement]:
        widths, tokens = _sizes(workspace, part)
        price = BATCHED * widths[1] * workspace.share(part)
        workspace.spending.require(PART, price, Budget.DEEP)
        with workspace.spending.timed(PART):
            last_in, last_out = (token_indices(tokens - 1, width=width) for width in widths)
            jacobian = restricted_jacobian(workspace.ends(part), last_out, last_in)
            values = singular_values(jacobian)
        workspace.spending.add(PART, price)
        kernel = kernel_of(workspace, part)
        null = kernel.dimension // tokens if kernel else 0
        how = f"dense SVD; the last of {tokens} tokens, the others' entries fixed, {workspace.conditions}"
        site = site_of(part)
        ranked = {row.quantity: row for row in ranked_rows(site, values, null, how)}
        return [
            Measurement(VALUES, site, tuple(map(float, values)), how=how),
            replace(ranked["jacobian/rank"], quantity=RANK),
            replace(ranked["jacobian/condition"], quantity=CONDITION),
        ]

    return guarded(workspace, (VALUES, RANK, CONDITION), site_of(part), measure)


def _sizes(workspace: Workspace, part: Block | Stack) -> tuple[tuple[int, int], int]:
    """d where `part` begins and where it ends, and T."""
    tensors = [workspace.graph.tensors.get(site) for site in ends_of(part)]
    if any(tensor is None for tensor in tensors):
        raise TangentError("where it begins or ends did not come by")
    entry, end = (tensor for tensor in tensors if tensor is not None)
    counts = {tensor.numel() // tensor.shape[-1] for tensor in (entry, end)}
    if len(counts) > 1 or any(tensor.ndim > 3 and tensor.shape[0] > 1 for tensor in (entry, end)):
        raise TangentError(f"no token is told in a stream of {tuple(entry.shape)} to {tuple(end.shape)}")
    return (entry.shape[-1], end.shape[-1]), counts.pop()
