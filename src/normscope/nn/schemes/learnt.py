"""Learnt factors: on each branch (ReZero, SkipInit, LayerScale, nGPT), or on the sum (GPAS).

Shapes: B batch, T tokens, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.joins import Built, Norm, Update
from normscope.nn.linear import Gain
from normscope.nn.placement import Rule, Slot, Where, norms_at, zero
from normscope.nn.scheme import Initialisation, Inside, Scheme


def learnt(start: Rule, *, per_feature: bool = False) -> Built:
    """x ← N(x + α⊙F(x)), α learnt from `start`: a vector (D,) if `per_feature`, else one number."""
    return Built("learnt", lambda site: LearntSum(start(site.where), site.width if per_feature else 1))


class LearntSum(nn.Module):
    """N(x + α⊙F(x)). α is (D,) or (1,): FSDP2 shards no parameter without an axis."""

    def __init__(self, start: float, num_scales: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((num_scales,), start))

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        return norm(torch.addcmul(x_BTD, self.scale, update(x_BTD)))


class PreservingScale(nn.Module):
    """y − SiLU(g)·sg(y), y = N(x + F(x)), g learnt from 0: scales values by 1 − SiLU(g), gradients not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        y_BTD = norm(x_BTD + update(x_BTD))
        return y_BTD - F.silu(self.gate) * y_BTD.detach()


class StepTowards(nn.Module):
    """N(h + |α| (F(h) − h)), with one α per feature, from 0.05."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = Gain((width,), start=0.05, held=width**-0.5)

    def forward(self, h_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        return norm(h_BTD + self.alpha().abs() * (update(h_BTD) - h_BTD))


def by_depth(where: Where) -> float:
    """CaiT's initial value: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond."""
    if where.num_blocks <= 18:
        return 0.1
    return 1e-5 if where.num_blocks <= 24 else 1e-6


REZERO = Scheme(
    "rezero",
    "x + αF(x), α = 0 at the start, one for each branch",
    norms_at(),
    "Bachlechner et al. 2020, arXiv:2003.04887 (theirs shares α in a block)",
    join=learnt(zero),
    initialisation=Initialisation("xavier"),
)
SKIPINIT = Scheme(
    "skipinit",
    "x + αF(x), α = 0 at the start",
    norms_at(),
    "De and Smith 2020, arXiv:2002.10444 (for residual networks without batch norm)",
    join=learnt(zero),
    initialisation=Initialisation("xavier"),
    reads_as="rezero",
)
LAYERSCALE = Scheme(
    "layerscale",
    "x + γ⊙F(N(x)), γ = 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Touvron et al. 2021 (CaiT), arXiv:2103.17239",
    join=learnt(by_depth, per_feature=True),
)
GPAS = Scheme(
    "gpas",
    "y − SiLU(g)·sg(y), y = x + F(N(x)), g = 0 at the start, sg the stop-gradient",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Chen et al. 2025, arXiv:2506.22049 (their code shares g in a block)",
    join=Built("learnt", lambda site: PreservingScale()),
)
NGPT = Scheme(
    "ngpt",
    "N(x + |α|⊙(N(F(x)) − x)), N(x) = x/‖x‖, α = .05 at the start",
    norms_at(Slot.ENTRY, Slot.BRANCH_OUT, Slot.STREAM),
    "Loshchilov et al. 2024, arXiv:2410.01131",
    join=Built("learnt", lambda site: StepTowards(site.width)),
    initialisation=Initialisation("fan-in"),
    inside=Inside(qk_norm="unit", hidden_gain=True),
    norm="unit",
    on_sphere=True,
)
