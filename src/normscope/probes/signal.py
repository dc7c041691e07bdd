"""Statistics of the residual stream from block to block, and of the term that each branch adds.

One forward, in eval mode. Over all elements x of a stream H (B, T, d), sums in float64:

    stream/mean       mean of x
    stream/rms        √(mean of x²)
    stream/max        largest |x|
    stream/kurtosis   mean of (x − mean)⁴ / variance², 3 for a normal distribution
    stream/faintest-token  the least RMS of a token over the RMS of all, where a stack begins
    stream/diversity  ‖H − h̄‖² / ‖H‖², h̄ the mean token of its sequence, mean over the sequences: 1 for
                      tokens with mean zero, 0 after rank collapse (Dong et al. 2021, arXiv 2103.03404)

at every block's exit, at "<stack>.input" and at "<stack>.hidden" (the diversity there is that of the last
block's exit where the final norm reads a part of the tokens); and at every branch

    branch/rms            RMS of the term that is added, after its own norms and scales
    branch/update-ratio   branch/rms over the RMS of the stream it is added to, α included
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from normscope.anatomy import Anatomy, Branch, Site, Stack
from normscope.probes.added import added, sites_of_added
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.rows import Found, at, captured_without_graph, ratio_row, row
from normscope.probes.sums import energy, exact, largest, rms
from normscope.probes.token_axes import batch_shape, sequences
from normscope.subjects import Subject

_Axes = tuple[tuple[int, ...], int | None]  # shape of the batch, and tokens of a sequence: see `sequences`


def measure_signal(subject: Subject, anatomy: Anatomy) -> list[Measurement]:
    """Statistics of the stream and the branches on the fixed batch; one forward, rows in its order."""
    captured = captured_without_graph(subject, _sites(anatomy))
    batch = batch_shape(subject.batch)
    return [row for stack in anatomy.stacks for row in _stack_rows(stack, captured, batch)]


def _sites(anatomy: Anatomy) -> Iterator[Site]:
    for stack in anatomy.stacks:
        yield stack.hidden
        attention = _first_attention(stack)
        if attention is not None:
            yield attention
        for block in stack.blocks:
            yield from (block.entry, block.exit)
            for branch in block.branches:
                yield from (branch.entry, *sites_of_added(branch), branch.sum)


def _stack_rows(
    stack: Stack, captured: Mapping[Site, Tensor], batch: tuple[int, ...]
) -> Iterator[Measurement]:
    axes = batch, _num_tokens(stack, captured)
    entry = at(captured, stack.blocks[0].entry)
    yield from _stream_rows(f"{stack.name}.input", entry, axes)
    yield _faintest_row(f"{stack.name}.input", entry)
    for block in stack.blocks:
        for branch in block.branches:
            yield from _branch_rows(branch, captured)
        yield from _stream_rows(block.site, at(captured, block.exit), axes)
    last = at(captured, stack.blocks[-1].exit)
    yield from _stream_rows(f"{stack.name}.hidden", at(captured, stack.hidden), axes, whole=last)


def _first_attention(stack: Stack) -> Site | None:
    """Site from which the length of a sequence is read: the probabilities of the first self-attention."""
    branches = (branch for block in stack.blocks for branch in block.branches if branch.kind == "attention")
    return next((branch.attention[0].probabilities for branch in branches if branch.attention), None)


def _num_tokens(stack: Stack, captured: Mapping[Site, Tensor]) -> int | None:
    """Tokens that attend to one another, from probabilities (…, T, T); None where they are not square."""
    attention = _first_attention(stack)
    if attention is None or attention not in captured:
        return None
    num_queries, num_keys = captured[attention].shape[-2:]
    return num_queries if num_queries == num_keys else None


def _stream_rows(site: str, found: Found, axes: _Axes, whole: Found = "") -> Iterator[Measurement]:
    for quantity, figure in (("mean", mean), ("rms", rms), ("max", largest)):
        yield row(f"stream/{quantity}", site, found, figure)
    if isinstance(found, str):
        yield not_measured("stream/kurtosis", site, found)
        yield not_measured("stream/diversity", site, found)
        return
    second, fourth = central_moments(found)
    yield ratio_row("stream/kurtosis", site, fourth, second**2)
    if not isinstance(whole, str) and (part := _count(found)) < (every := _count(whole)):
        remark = f"of the last block's state, as the final norm reads {part} of its {every} tokens"
        yield _diversity_row(site, whole, axes, remark)
    else:
        yield _diversity_row(site, found, axes)


def _count(stream: Tensor) -> int:
    """Tokens of a stream, over all sequences."""
    return stream.numel() // stream.shape[-1] if stream.ndim else 0


def _faintest_row(site: str, found: Found) -> Measurement:
    quantity = "stream/faintest-token"
    if isinstance(found, str):
        return not_measured(quantity, site, found)
    least = min(float(norms.min()) for norms in (exact(part).norm(dim=-1) for part in found.split(1)))
    return ratio_row(quantity, site, least / found.shape[-1] ** 0.5, rms(found))


def _diversity_row(site: str, stream: Tensor, axes: _Axes, of: str = "") -> Measurement:
    quantity = "stream/diversity"
    if stream.ndim < 2:
        return not_measured(quantity, site, f"a stream of shape {tuple(stream.shape)} has no token axis")
    tokens, remark = sequences(stream, *axes)
    if tokens.shape[1] < 2:
        return not_measured(quantity, site, "a sequence of one token has no diversity")
    how = "; ".join(filter(None, (EXACT, of, remark)))
    ratios = [share for share in map(diversity, tokens) if share is not None]
    return ratio_row(quantity, site, sum(ratios), len(ratios), how)


def _branch_rows(branch: Branch, captured: Mapping[Site, Tensor]) -> Iterator[Measurement]:
    term = added(branch, captured)
    yield row("branch/rms", branch.site, term, rms)
    stream, how = _stream_rms(branch, captured, term)
    if isinstance(term, str):
        yield not_measured("branch/update-ratio", branch.site, term)
    elif isinstance(stream, str):
        yield not_measured("branch/update-ratio", branch.site, stream)
    else:
        yield ratio_row("branch/update-ratio", branch.site, rms(term), stream, how)


def _stream_rms(branch: Branch, captured: Mapping[Site, Tensor], term: Found) -> tuple[float | str, str]:
    """RMS of α·x, and how: from the entry where α is a number, else from the sum minus the term."""
    entry, total = captured.get(branch.entry), captured.get(branch.sum)
    if entry is not None and branch.stream_scale != "learnt" and branch.join in ("add", "scaled"):
        scale = 1.0 if branch.stream_scale is None else float(branch.stream_scale)
        return abs(scale) * rms(entry), EXACT
    if isinstance(term, str) or total is None:
        return "this forward did not compute the stream it is added to", EXACT
    if term.numel() != total.numel():
        return f"the sum {tuple(total.shape)} and its term {tuple(term.shape)} differ in shape", EXACT
    difference = exact(total) - exact(term).reshape(total.shape)
    return rms(difference), "exact; the stream is the sum minus the term"


def mean(tensor: Tensor) -> float:
    """Mean over all elements, summed in float64."""
    return float(tensor.detach().sum(dtype=torch.float64)) / tensor.numel()


def central_moments(tensor: Tensor) -> tuple[float, float]:
    """Second and fourth central moment over all elements, float64."""
    centre, count = mean(tensor), tensor.numel()
    second = fourth = 0.0
    for piece in tensor.detach().reshape(-1).split(1 << 18):
        squares = (exact(piece) - centre).square()
        second, fourth = second + float(squares.sum()), fourth + energy(squares)
    return second / count, fourth / count


def diversity(sequence: Tensor) -> float | None:
    """‖H − h̄‖²/‖H‖² of one sequence H (T, d), None where H is zero; correct down to 1e-30."""
    tokens = exact(sequence)
    whole = float(tokens.square().sum())
    return float(centred(tokens).square().sum()) / whole if whole else None


def centred(tokens: Tensor) -> Tensor:
    """Tokens (T, d) of one sequence less their mean.

    The first token is subtracted from all before their mean, which is exact for tokens that differ only in
    their last digits; a rounded mean would leave round-off.
    """
    differences = tokens - tokens[:1]
    return differences - differences.mean(0)
