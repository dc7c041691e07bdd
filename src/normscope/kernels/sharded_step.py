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


Statistics = tuple[Tensor | None, Tensor | None, Tensor]


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
    """What a rank adds to the table (…, 2R + 1) of each row: m_r, δ_r and M_r.

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


def _statistics(x: Tensor, shards: FeatureShards, eps: float, centred: bool) -> Statistics:
    """Pivot, shift and 1/√(variance + ε) of each row; for RMSNorm None, None and 1/√(mean square + ε)."""
    if not centred:
        power = _Sum.apply(x.square().sum(-1, keepdim=True) / shards.width, shards)
        return None, None, torch.rsqrt(power + eps)
    pivot, shift, variance = merged(_Sum.apply(slots(x, shards.sizes, shards.rank), shards), shards.sizes)
    return pivot, shift, torch.rsqrt(variance + eps)


class ShardNorm(torch.autograd.Function):
    """LayerNorm (centred) or RMSNorm of one rank's shard.

    With s = √(variance + ε), x̂ = (x − mean)/s and h = γ·g, the gradient of x is
    (h − Σh/d − x̂ Σ(h x̂)/d)/s; RMSNorm has no Σh/d. The sums run over all features, in one all-reduce.
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
        statistics = _statistics(_wide(x), shards, eps, centred)
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.shards, ctx.eps, ctx.centred = shards, eps, centred
        y = _normed(x, *statistics)
        if weight is not None:
            y = y * _wide(weight)
        if bias is not None:
            y = y + _wide(bias)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *saved = ctx.saved_tensors
        statistics: Statistics = (saved[0], saved[1], saved[2])
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph
            statistics = _statistics(_wide(x), ctx.shards, ctx.eps, ctx.centred)
        normed, wide_grad = _normed(x, *statistics), _wide(grad)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            inner = wide_grad if weight is None else wide_grad * _wide(weight)
            grad_x = (_along_the_sphere(inner, normed, ctx.shards, ctx.centred) * statistics[-1]).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _over_rows(wide_grad * normed).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _over_rows(wide_grad).to(bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _along_the_sphere(inner: Tensor, normed: Tensor, shards: FeatureShards, centred: bool) -> Tensor:
    """h − x̂ Σ(h x̂)/d, and less Σh/d if centred: the gradient of x times s."""
    sums = [(inner * normed).sum(-1, keepdim=True)]
    if centred:
        sums.append(inner.sum(-1, keepdim=True))
    means = _Sum.apply(torch.cat(sums, -1), shards) / shards.width
    grad = inner - normed * means[..., :1]
    return grad - means[..., 1:] if centred else grad


def _normed(x: Tensor, pivot: Tensor | None, shift: Tensor | None, scale: Tensor) -> Tensor:
    """x̂; the pivot is subtracted first, which rounds little where x is close to its mean."""
    return (_wide(x) if pivot is None or shift is None else (_wide(x) - pivot) - shift) * scale


def _over_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0) if x.ndim > 1 else x


def _wide(x: Tensor) -> Tensor:
    """x, in float32 if it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
