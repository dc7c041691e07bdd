"""Norms for the slots of a scheme; `token_norms.py` has the norms with statistics over tokens.

Each norm maps (…, D) to (…, D) and is called as `norm(x_BTD, real_BT=None)`. `real_BT` is False at padding;
only norms with statistics over tokens use it. Inputs in half precision get statistics in float32.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from normscope.errors import UsageError, suggest
from normscope.nn.tensors import unit, wide
from normscope.nn.token_norms import BatchNorm, GroupNorm


class NoNorm(nn.Module):
    """x: a slot without a norm."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return x


class LayerNorm(nn.LayerNorm):
    """γ (x − mean)/√(var + ε) + β over the features (Ba et al. 2016, arXiv:1607.06450)."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """γ x/√(mean x² + ε) over the features (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)  # autocast: only x is in half precision


class RMSNormPlusOne(nn.Module):
    """(1 + γ) x/√(mean x² + ε), γ from 0, so that weight decay pulls the gain to 1 (Gemma)."""

    base = 1.0
    """The gain at weight 0."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        # In half precision 1 + γ would lose a small γ.
        x_wide, gain = wide(x), self.base + wide(self.weight)
        return nn.functional.rms_norm(x_wide, self.weight.shape, gain, self.eps).to(x.dtype)


class ScaleNorm(nn.Module):
    """g x/‖x‖ with one learnt g from √D (Nguyen and Salazar 2019, arXiv:1910.05895); ‖x‖ is at least ε."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((1,), width**0.5))

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return (wide(self.weight) * unit(wide(x), self.eps)).to(x.dtype)


class UnitNorm(nn.Module):
    """x/‖x‖ without parameters (nGPT, Loshchilov et al. 2024, arXiv:2410.01131); zero stays zero."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return unit(wide(x)).to(x.dtype)


class DyT(nn.Module):
    """γ tanh(a x) + β, a one learnt number from ½ (Zhu et al. 2025, arXiv:2503.10622): no statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return torch.tanh(self.scale * x) * self.weight + self.bias


class Derf(nn.Module):
    """γ erf(a x + s) + β, one learnt a from ½ and one s from 0 (Chen et al. 2025, arXiv:2512.10938)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return torch.erf(self.scale * x + self.shift) * self.weight + self.bias


class SeeDNorm(nn.Module):
    """(γ + α tanh(x·β)) ⊙ x/√(mean x² + ε) over the features (Cai et al. 2025, arXiv:2510.22777).

    The gain of each feature depends on the token, so that part of the length of x survives. γ and α start at
    1 and β at 0, which is RMSNorm. The formula was read in a transcription of the paper, which leaves out the
    initial values: these are ours.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.scale = nn.Parameter(torch.ones(width))
        self.direction = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        x_wide = wide(x)
        amount = torch.tanh((x_wide * wide(self.direction)).sum(-1, keepdim=True))
        gain = wide(self.weight) + wide(self.scale) * amount
        return (gain * nn.functional.rms_norm(x_wide, self.weight.shape, eps=self.eps)).to(x.dtype)


class BHyT(nn.Module):
    """γ tanh(λ x/(κ √(mean x² + ε))) over the features, λ one learnt number from 2, κ = 10 (Byun et al. 2025,
    arXiv:2601.09719).

    As `BHyT_Star` in the authors' code, with exact statistics in every norm. Their cheaper form estimates the
    statistics of a block's second norm from those of its first.
    """

    kappa = 10.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        normed = nn.functional.rms_norm(wide(x), self.weight.shape, eps=self.eps)
        return (wide(self.weight) * torch.tanh(wide(self.scale) * normed / self.kappa)).to(x.dtype)


NORMS: Mapping[str, Callable[[int, float], nn.Module]] = MappingProxyType(
    {
        "layernorm": lambda width, eps: LayerNorm(width, eps=eps),
        "rmsnorm": lambda width, eps: RMSNorm(width, eps=eps),
        "rmsnorm-plus-one": RMSNormPlusOne,
        "scalenorm": ScaleNorm,
        "unit": lambda width, eps: UnitNorm(),
        "batchnorm": BatchNorm,
        "groupnorm": GroupNorm,
        "dyt": lambda width, eps: DyT(width),
        "derf": lambda width, eps: Derf(width),
        "seednorm": SeeDNorm,
        "bhyt": BHyT,
        "none": lambda width, eps: NoNorm(),
    }
)
"""Kind → maker of (width, eps)."""

OVER_TOKENS = frozenset({"batchnorm", "groupnorm"})
"""Kinds with statistics over tokens: a slot can hold them; the inside of a branch or a join cannot."""
LEAKING = frozenset({"groupnorm"})
"""Kinds whose statistics include later tokens, even in eval mode."""


def norm_named(kind: str) -> Callable[[int, float], nn.Module]:
    """The maker of norms of a kind; UsageError with the nearest kind if it is unknown."""
    if kind not in NORMS:
        known = ", ".join(NORMS)
        raise UsageError(f'norm="{kind}"', f"one of {known}", suggest(kind, NORMS, "choose one of these"))
    return NORMS[kind]
