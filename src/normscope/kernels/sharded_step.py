"""Norms of one rank's shard, with one all-reduce forward and one backward.

Notation: R ranks share d features, and rank r holds n_r of them. Its mean is m_r + δ_r: m_r is the rounded
mean, and δ_r the mean of x − m_r, which is what the rounding lost. M_r is its sum of squared distances from
its mean. Suffix of shapes: (…, n_r) is a shard, (…, 1) a statistic of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

from normscope.kernels.row_blocks import by_rows, row_blocks
from normscope.kernels.sharded_layout import FeatureShards


class Moments(NamedTuple):
    """Mean and variance of rows; the mean is the unrounded sum pivot + shift.

    Attributes:
        pivot: the first rank's rounded mean (…, 1).
        shift: mean of x − pivot (…, 1).
        variance: mean of (x − mean)² (…, 1).
    """

    pivot: Tensor
    shift: Tensor
    variance: Tensor


class _Sum(torch.autograd.Function):
    """Sum over the ranks that share the features, by one all-reduce; its derivative is the same sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shards: FeatureShards) -> Tensor:
        ctx.shards = shards
        group = (shards.mesh, shards.dim)
        return collectives.wait_tensor(collectives.all_reduce(part.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.shards), None


def slots(x: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """Summand of a rank in the table (…, 2R + 1) of each row: m_r, δ_r and M_r.

    m_r stands in slot r and δ_r in slot R + r; the other ranks have 0 there. So the sum of all tables holds
    every mean with all its digits. The last slot is Σ M_r, whose terms are not negative and cannot cancel.
    """
    count = max(x.shape[-1], 1)
    mean = x.sum(-1, keepdim=True) / count
    rest = x - mean
    lost = rest.sum(-1, keepdim=True) / count
    squares = (rest - lost).square().sum(-1, keepdim=True)
    around = (rank, len(sizes) - 1 - rank)
    return torch.cat([functional.pad(mean, around), functional.pad(lost, around), squares], -1)


def merged(table: Tensor, sizes: Sequence[int]) -> Moments:
    """Moments of rows from the sum of all ranks' `slots`, by Chan's merging.

    With e_r = (m_r − m_0) + δ_r and e = Σ n_r e_r/d: mean = m_0 + e, variance = (Σ M_r + Σ n_r (e_r − e)²)/d.
    Only differences of means enter, so that an offset of x costs no digits. The layout gives the n_r.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
    """
    ranks, width = len(sizes), sum(sizes)
    means, lost, within = table.split([ranks, ranks, 1], -1)
    counts = table.new_tensor(sizes)
    pivot = means[..., :1]  # the first rank always holds features
    from_pivot = (means - pivot) + lost
    shift = (counts * from_pivot).sum(-1, keepdim=True) / width
    between = (counts * (from_pivot - shift).square()).sum(-1, keepdim=True)
    return Moments(pivot, shift, (within + between) / width)


def _statistics(x: Tensor, shards: FeatureShards, eps: float, centred: bool) -> Tensor:
    """Statistics of the rows of x (rows, n_r), by one all-reduce.

    (rows, 3) for LayerNorm: pivot, shift, 1/√(variance + ε). (rows, 1) for RMSNorm: 1/√(mean square + ε).
    """
    if centred:
        table = _Sum.apply(by_rows(lambda x: slots(_wide(x), shards.sizes, shards.rank), x), shards)
        pivot, shift, variance = merged(table, shards.sizes)
        return torch.cat([pivot, shift, torch.rsqrt(variance + eps)], -1)
    squares = by_rows(lambda x: _wide(x).square().sum(-1, keepdim=True), x)
    return torch.rsqrt(_Sum.apply(squares / shards.width, shards) + eps)


class ShardNorm(torch.autograd.Function):
    """LayerNorm (centred) or RMSNorm of one rank's shard (rows, n_r).

    With s = √(variance + ε), x̂ = (x − mean)/s and h = γ·g, the gradient of x is
    (h − x̂ Σ(h x̂)/d − Σh/d)/s; RMSNorm has no Σh/d. The sums run over all features, in one all-reduce.
    Under `create_graph` the statistics are computed again from x, with one more all-reduce, so that second
    derivatives are right. It has no `jvp`, which `torch.compile` cannot trace: PyTorch refuses forward mode.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shards: FeatureShards,
        eps: float,
        centred: bool,
    ) -> Tensor:
        statistics = _statistics(x, shards, eps, centred)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.shards, ctx.eps, ctx.centred = shards, eps, centred

        def output(x: Tensor, statistics: Tensor) -> Tensor:
            y = _gained(_normed(x, statistics), weight)
            return (y if bias is None else y + _wide(bias)).to(x.dtype)

        return by_rows(output, x, statistics)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph
            statistics = _statistics(x, ctx.shards, ctx.eps, ctx.centred)
        sums, grad_weight, grad_bias = [], [], []
        for part, known, inner in row_blocks(x, statistics, grad):
            normed, inner = _normed(part, known), _wide(inner)
            if ctx.needs_input_grad[1]:
                grad_weight.append((inner * normed).sum(0))
            if ctx.needs_input_grad[2]:
                grad_bias.append(inner.sum(0))
            if ctx.needs_input_grad[0]:
                sums.append(_row_sums(_gained(inner, weight), normed, ctx.centred))
        grad_x = None
        if ctx.needs_input_grad[0]:
            means = _Sum.apply(torch.cat(sums), ctx.shards) / ctx.shards.width
            grad_x = by_rows(
                lambda x, statistics, grad, means: _input_gradient(
                    x, statistics, _gained(grad, weight), means
                ),
                x,
                statistics,
                grad,
                means,
            )
        return grad_x, _total(grad_weight, weight), _total(grad_bias, bias), None, None, None


def _row_sums(inner: Tensor, normed: Tensor, centred: bool) -> Tensor:
    """This rank's Σ(h x̂) of each row, and Σh for LayerNorm."""
    along = (inner * normed).sum(-1, keepdim=True)
    return torch.cat([along, inner.sum(-1, keepdim=True)], -1) if centred else along


def _input_gradient(x: Tensor, statistics: Tensor, inner: Tensor, means: Tensor) -> Tensor:
    grad = inner - _normed(x, statistics) * means[:, :1]
    if means.shape[-1] == 2:
        grad = grad - means[:, 1:]
    return (grad * statistics[:, -1:]).to(x.dtype)


def _normed(x: Tensor, statistics: Tensor) -> Tensor:
    """x̂; the pivot is subtracted first, which rounds little where x is close to its mean."""
    scale = statistics[:, -1:]
    if statistics.shape[-1] == 1:
        return _wide(x) * scale
    return ((_wide(x) - statistics[:, :1]) - statistics[:, 1:2]) * scale


def _gained(x: Tensor, weight: Tensor | None) -> Tensor:
    """γ x, not in half precision."""
    return _wide(x) if weight is None else _wide(x) * _wide(weight)


def _total(parts: list[Tensor], like: Tensor | None) -> Tensor | None:
    """Sum of the blocks' parts in the dtype of a parameter; None without parts."""
    if like is None or not parts:
        return None
    return (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).to(like.dtype)


def _wide(x: Tensor) -> Tensor:
    """x, in float32 if it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
