"""Norms with statistics over tokens, without padding, at least in float32.

If there is no padding, and in BatchNorm's eval mode, torch's own kernels are used.

Shapes: B batch, T tokens, N = B·T, D width, G groups, C channels of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.tensors import wide

CHANNELS_OF_A_GROUP = 16


class BatchNorm(nn.Module):
    """γ (x − mean)/√(var + ε) + β for each feature over all tokens of the batch (Ioffe and Szegedy 2015,
    arXiv:1502.03167; Shen et al. 2020, arXiv:2003.07845, on Transformers).

    As in `nn.BatchNorm1d`, train mode uses the statistics of the batch. These include later tokens, so that
    even a causal model sees them. Running statistics follow by `momentum`, with the unbiased variance. Eval
    mode uses the running statistics, and a causal model is then causal.
    """

    def __init__(self, width: int, eps: float, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.num_batches_tracked: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x_BTD: Tensor, real_BT: Tensor | None = None) -> Tensor:
        # torch refuses a batch of one token, whose unbiased variance is 0/0.
        if self.training and (real_BT is not None or x_BTD.shape[0] * x_BTD.shape[1] == 1):
            mean_D, var_D = self._statistics(wide(x_BTD), real_BT)
            y = (wide(x_BTD) - mean_D) * torch.rsqrt(var_D + self.eps)
            return (wide(self.weight) * y + wide(self.bias)).to(x_BTD.dtype)
        mean_D, var_D = wide(self.running_mean), wide(self.running_var)
        # As (N, D): torch's kernels would copy (B, D, T).
        x_ND, gain_D, shift_D = wide(x_BTD).flatten(0, 1), wide(self.weight), wide(self.bias)
        y_ND = F.batch_norm(x_ND, mean_D, var_D, gain_D, shift_D, self.training, self.momentum, self.eps)
        if self.training:
            if mean_D.dtype != self.running_mean.dtype:  # `wide` copies half precision
                self.running_mean.copy_(mean_D)
                self.running_var.copy_(var_D)
            self.num_batches_tracked.add_(1)
        return y_ND.view_as(x_BTD).to(x_BTD.dtype)

    def _statistics(self, x_BTD: Tensor, real_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch; updates the running statistics."""
        mean_11D, var_11D, count = masked_moments(x_BTD, real_BT, (0, 1))
        mean_D, var_D, count = mean_11D[0, 0], var_11D[0, 0], count[0, 0]
        with torch.no_grad():
            unbiased_D = var_D * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean_D.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased_D.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        return mean_D, var_D


class GroupNorm(nn.Module):
    """γ (x − mean)/√(var + ε) + β, the statistics over all tokens of a sequence and the channels of a group
    (Wu and He 2018, arXiv:1803.08494).

    Groups have 16 channels, the paper's second setting; there is one group if 16 does not divide the width.
    The statistics of a token include later ones, so causal models refuse this norm.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.groups = width // CHANNELS_OF_A_GROUP if width % CHANNELS_OF_A_GROUP == 0 else 1
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTD: Tensor, real_BT: Tensor | None = None) -> Tensor:
        if real_BT is None:
            x_BDT, gain_D, shift_D = wide(x_BTD).transpose(1, 2), wide(self.weight), wide(self.bias)
            y_BDT = F.group_norm(x_BDT, self.groups, gain_D, shift_D, self.eps)
            return y_BDT.transpose(1, 2).to(x_BTD.dtype)
        x_BTGC = wide(x_BTD).unflatten(-1, (self.groups, -1))
        mean_B1G1, var_B1G1, _ = masked_moments(x_BTGC, real_BT, (1, 3))
        y_BTD = ((x_BTGC - mean_B1G1) * torch.rsqrt(var_B1G1 + self.eps)).flatten(2)
        return (wide(self.weight) * y_BTD + wide(self.bias)).to(x_BTD.dtype)


def masked_moments(x: Tensor, real_BT: Tensor | None, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of entries of `x` (B, T, …) at real tokens; `dims` are kept as 1."""
    weight = x.new_ones(x.shape[:2]) if real_BT is None else real_BT.to(x.dtype)
    weight = weight[(...,) + (None,) * (x.dim() - 2)].expand_as(x)
    # A sequence without a real token keeps a finite mean of 0.
    count = weight.sum(dims, keepdim=True).clamp(min=1)
    mean = (weight * x).sum(dims, keepdim=True) / count
    var = (weight * (x - mean).square()).sum(dims, keepdim=True) / count
    return mean, var, count
