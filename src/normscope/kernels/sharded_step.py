"""Norms of one rank's shard, with one all-reduce forward and one backward.

Notation: R ranks, rank r holds n_r of d features; m_r is their mean and M_r their sum of squared distances
from m_r. Suffix of shapes: (…, n_r) is a shard, (…, 1) a statistic of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

from normscope.errors import UsageError
from normscope.kernels.sharded_layout import FeatureShards


class _Sum(torch.autograd.Function):
    """Sum over the ranks that share the features, by one all-reduce; its derivative is the same sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shards: FeatureShards) -> Tensor:
        ctx.shards = shards
        return collectives.wait_tensor(
            collectives.all_reduce(part.contiguous(), "sum", (shards.mesh, shards.dim))
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.shards), None


def mean_and_variance(x: Tensor, shards: FeatureShards) -> tuple[Tensor, Tensor]:
    """Mean and variance of each row over all ranks, from a shard x (…, n_r), with one all-reduce."""
    return merged(_Sum.apply(slots(x, shards.sizes, shards.rank), shards), shards.sizes)


def slots(x: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """What a rank adds to the table (…, R + 1) of each row: m_r in slot r of R, and M_r in the last slot.

    All other slots are 0. Summed over ranks, the table holds every m_r with all its digits, and Σ M_r, whose
    terms are not negative and cannot cancel.
    """
    mean = x.sum(-1, keepdim=True) / max(x.shape[-1], 1)
    squares = (x - mean).square().sum(-1, keepdim=True)
    return torch.cat([functional.pad(mean, (rank, len(sizes) - 1 - rank)), squares], -1)


def merged(table: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance of rows from the sum of all ranks' `slots`, by Chan's merging.

    mean = Σ n_r m_r/d and variance = (Σ M_r + Σ n_r (m_r − mean)²)/d, with the n_r from the layout.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
    """
    means, within, width = table[..., :-1], table[..., -1:], sum(sizes)
    counts = table.new_tensor(sizes)
    pivot = means[..., :1]  # the first rank is never empty; distances from it keep the digits of the means
    mean = pivot + (counts * (means - pivot)).sum(-1, keepdim=True) / width
    between = (counts * (means - mean).square()).sum(-1, keepdim=True)
    return mean, (within + between) / width


def mean_square(x: Tensor, shards: FeatureShards) -> Tensor:
    """Mean of x² of each row over all ranks, from a shard x (…, n_r); one number a row is all-reduced."""
    return _Sum.apply(x.square().sum(-1, keepdim=True) / shards.width, shards)


def _statistics(x: Tensor, shards: FeatureShards, eps: float, centred: bool) -> tuple[Tensor | None, Tensor]:
    """Mean (None for RMSNorm) and 1/√(variance + ε) or 1/√(mean square + ε) of each row."""
    if centred:
        mean, variance = mean_and_variance(x, shards)
        return mean, torch.rsqrt(variance + eps)
    return None, torch.rsqrt(mean_square(x, shards) + eps)


class ShardNorm(torch.autograd.Function):
    """LayerNorm (centred) or RMSNorm of one rank's shard.

    With s = √(variance + ε), x̂ = (x − mean)/s and h = γ·g, the gradient of x is
    (h − Σh/d − x̂ Σ(h x̂)/d)/s; RMSNorm has no Σh/d. The sums run over all features, in one all-reduce.
    Under `create_graph` the statistics are computed again from x, with one more all-reduce, so that second
    derivatives are right.
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
        mean, scale = _statistics(_wide(x), shards, eps, centred)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.shards, ctx.eps, ctx.centred = shards, eps, centred
        y = _normed(x, mean, scale)
        if weight is not None:
            y = y * _wide(weight)
        if bias is not None:
            y = y + _wide(bias)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph
            mean, scale = _statistics(_wide(x), ctx.shards, ctx.eps, ctx.centred)
        normed, wide_grad = _normed(x, mean, scale), _wide(grad)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            inner = wide_grad if weight is None else wide_grad * _wide(weight)
            grad_x = _input_gradient(inner, normed, scale, ctx.shards, ctx.centred).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _over_rows(wide_grad * normed).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _over_rows(wide_grad).to(bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UsageError(
            "forward-mode differentiation of a sharded norm",
            "reverse mode, which DTensor supports",
            "use torch.autograd.grad, twice with create_graph=True for a product Jv",
        )


def _input_gradient(
    inner: Tensor, normed: Tensor, scale: Tensor, shards: FeatureShards, centred: bool
) -> Tensor:
    sums = [(inner * normed).sum(-1, keepdim=True)]
    if centred:
        sums.append(inner.sum(-1, keepdim=True))
    means = _Sum.apply(torch.cat(sums, -1), shards) / shards.width
    grad = inner - normed * means[..., :1]
    if centred:
        grad = grad - means[..., 1:]
    return grad * scale


def _normed(x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
    return (_wide(x) if mean is None else _wide(x) - mean) * scale


def _over_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0) if x.ndim > 1 else x


def _wide(x: Tensor) -> Tensor:
    """x, in float32 if it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
