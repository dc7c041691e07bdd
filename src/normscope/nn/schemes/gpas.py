"""GPAS (Chen et al. 2025, arXiv:2506.22049): Pre-LN whose stream is scaled down, its gradient not.

Shapes: B batch, T tokens, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.joins import Built, Norm, Update
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme


class PreservingScale(nn.Module):
    """y − SiLU(g)·sg(y), y = N(x + F(x)), g learnt from 0: values shrink by 1 − SiLU(g), gradients do not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        y_BTD = norm(x_BTD + update(x_BTD))
        return y_BTD - F.silu(self.gate) * y_BTD.detach()


GPAS_PRE = Scheme(
    "gpas",
    "y − SiLU(g)·sg(y), y = x + F(N(x)), g = 0 at the start, sg the stop-gradient",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Chen et al. 2025, arXiv:2506.22049 (their code shares g in a block)",
    join=Built("learnt", lambda site: PreservingScale()),
)
