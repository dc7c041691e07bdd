"""mHC (Xie et al. 2025, arXiv:2512.24880): Hyper-Connections whose streams mix by doubly stochastic matrices.

Shapes: B batch, T tokens, n streams, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.joins import Copies, Norm, State, Update, streams_in_one
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme

_EPS = 1e-6


class ManifoldConnection(nn.Module):
    """H ← R H + q⊗F(pᵀH).

    With x̃ the RMS norm of all n·D entries of H and s a learnt factor for each of the three,
    p = σ(s_p x̃Φ_p + b_p), q = 2σ(s_q x̃Φ_q + b_q), R = Sinkhorn(s_R x̃Φ_R + b_R). Φ is Xavier-uniform, b = 0
    (NVIDIA's Megatron): the start is near p = ½, q = 1, R = 1/n, and each stream near the Pre-LN stream.

    Args:
        num_streams: n.
        num_steps: steps of Sinkhorn.
        dynamic_scale: start of each s.
    """

    def __init__(
        self, width: int, num_streams: int, num_steps: int = 20, dynamic_scale: float = 0.01
    ) -> None:
        super().__init__()
        self.num_streams, self.num_steps = num_streams, num_steps
        num_out = num_streams * (2 + num_streams)
        weight = nn.init.xavier_uniform_(torch.empty(num_out, num_streams * width))
        # No nn.Linear: its outputs do not grow with the width, so that neither μP nor Muon may take it.
        self.weights = nn.ParameterDict({"weight": weight, "bias": torch.zeros(num_out)})
        self.scales = nn.Parameter(torch.full((3,), dynamic_scale))

    def forward(self, state: State, update: Update, norm: Norm) -> Tensor:
        """(B, T, n, D) → (B, T, n, D)."""
        h_BTnD = streams_in_one(state, self.num_streams)
        read_BT1n, write_BTn1, mix_BTnn = self.connections(h_BTnD)
        f_BTD = update((read_BT1n @ h_BTnD).squeeze(-2))
        return norm(mix_BTnn @ h_BTnD + write_BTn1 * f_BTD.unsqueeze(-2))

    def connections(self, h_BTnD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p (B, T, 1, n), q (B, T, n, 1) and R (B, T, n, n), taken in float32 at least."""
        n, dtype = self.num_streams, h_BTnD.dtype
        wide = torch.promote_types(dtype, torch.float32)
        x_BTX = h_BTnD.flatten(-2).to(wide)
        raw_BTW = F.linear(F.rms_norm(x_BTX, x_BTX.shape[-1:], eps=_EPS), self.weights["weight"].to(wide))
        parts = zip(
            self.scales.to(wide),
            raw_BTW.split((n, n, n * n), dim=-1),
            self.weights["bias"].to(wide).split((n, n, n * n)),
            strict=True,
        )
        read_BTn, write_BTn, mix_BTm = (scale * raw + bias for scale, raw, bias in parts)
        mix_BTnn = sinkhorn(mix_BTm.unflatten(-1, (n, n)), self.num_steps)
        read_BT1n, write_BTn1 = read_BTn.sigmoid().unsqueeze(-2), 2 * write_BTn.sigmoid().unsqueeze(-1)
        return read_BT1n.to(dtype), write_BTn1.to(dtype), mix_BTnn.to(dtype)


def sinkhorn(logits: Tensor, num_steps: int) -> Tensor:
    """exp(logits), (…, n, n), with its columns, then its rows, divided by their sums, `num_steps` times.

    Tends to a doubly stochastic matrix (Sinkhorn and Knopp 1967). In logarithms: no large logit overflows.
    """
    for _ in range(num_steps):
        logits = logits.log_softmax(dim=-2).log_softmax(dim=-1)
    return logits.exp()


MHC = Scheme(
    "mhc",
    "H ← RH + q⊗F(N(pᵀH)), 4 streams; R by 20 Sinkhorn steps, p = σ(·), q = 2σ(·)",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Xie et al. 2025, arXiv:2512.24880",
    join=Copies(lambda site, n: ManifoldConnection(site.width, n), mean=True),
)
