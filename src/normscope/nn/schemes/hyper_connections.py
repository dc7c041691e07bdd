"""n streams with learnt connections: Hyper-Connections, and mHC with doubly stochastic mixing.

Shapes: B batch, T tokens, n streams, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.joins import Copies, Norm, State, Update, streams_in_one
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme
from normscope.nn.tensors import wide

DYNAMIC_SCALE = 0.01
"""Initial value of the learnt factors on the input-dependent weights."""
SINKHORN_STEPS = 20


class HyperConnection(nn.Module):
    """H ← A_rᵀH + B⊗F(A_mᵀH), each weight the sum of a static and a dynamic part.

    [A_m | A_r] = A + s_a·tanh(N(H) W_a) and B = b + s_b·tanh(N(H) w_b), N a LayerNorm of each stream. At the
    start W_a, w_b = 0, A_m = e_{k mod n}, A_r = I and b = 1: each stream is then the stream of Pre-LN.

    Args:
        first: the stream that is read initially, k mod n for sublayer k, from 0.
    """

    def __init__(self, width: int, num_streams: int, first: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        read = torch.zeros(num_streams, 1)
        read[first] = 1.0
        self.mix = nn.Parameter(torch.cat([read, torch.eye(num_streams)], dim=1))
        self.write = nn.Parameter(torch.ones(num_streams))
        self.dynamic_mix = nn.Parameter(torch.zeros(width, 1 + num_streams))
        self.dynamic_write = nn.Parameter(torch.zeros(width, 1))
        self.mix_scale = nn.Parameter(torch.full((1,), DYNAMIC_SCALE))
        self.write_scale = nn.Parameter(torch.full((1,), DYNAMIC_SCALE))

    def forward(self, state: State, update: Update, norm: Norm) -> Tensor:
        """(B, T, n, D) → (B, T, n, D)."""
        h_BTnD = streams_in_one(state, len(self.write))
        normed_BTnD = self.norm(h_BTnD)
        mix_BTnm = self.mix + self.mix_scale * torch.tanh(normed_BTnD @ self.dynamic_mix)
        write_BTn1 = self.write[:, None] + self.write_scale * torch.tanh(normed_BTnD @ self.dynamic_write)
        mixed_BTmD = mix_BTnm.mT @ h_BTnD
        f_BTD = update(mixed_BTmD[..., 0, :])
        return norm(mixed_BTmD[..., 1:, :] + write_BTn1 * f_BTD.unsqueeze(-2))


class ManifoldConnection(nn.Module):
    """H ← R H + q⊗F(pᵀH).

    With x̃ the RMS norm of all n·D entries of H and s a learnt factor for each of the three,
    p = σ(s_p x̃Φ_p + b_p), q = 2σ(s_q x̃Φ_q + b_q), R = Sinkhorn(s_R x̃Φ_R + b_R). Φ is Xavier-uniform, b = 0
    (NVIDIA's Megatron): the start is near p = ½, q = 1, R = 1/n, and each stream near the Pre-LN stream.

    Args:
        num_streams: n.
    """

    def __init__(self, width: int, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams
        num_out = num_streams * (2 + num_streams)
        weight = nn.init.xavier_uniform_(torch.empty(num_out, num_streams * width))
        # No nn.Linear: its outputs do not grow with the width, so neither μP nor Muon applies.
        self.weights = nn.ParameterDict({"weight": weight, "bias": torch.zeros(num_out)})
        self.scales = nn.Parameter(torch.full((3,), DYNAMIC_SCALE))

    def forward(self, state: State, update: Update, norm: Norm) -> Tensor:
        """(B, T, n, D) → (B, T, n, D)."""
        h_BTnD = streams_in_one(state, self.num_streams)
        read_BT1n, write_BTn1, mix_BTnn = self.connections(h_BTnD)
        f_BTD = update((read_BT1n @ h_BTnD).squeeze(-2))
        return norm(mix_BTnn @ h_BTnD + write_BTn1 * f_BTD.unsqueeze(-2))

    def connections(self, h_BTnD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p (B, T, 1, n), q (B, T, n, 1) and R (B, T, n, n), computed at least in float32."""
        n, dtype = self.num_streams, h_BTnD.dtype
        x_BTX = wide(h_BTnD).flatten(-2)
        raw_BTW = F.linear(F.rms_norm(x_BTX, x_BTX.shape[-1:], eps=1e-6), wide(self.weights["weight"]))
        sizes = (n, n, n * n)
        bias = wide(self.weights["bias"]).split(sizes)
        parts = zip(wide(self.scales), raw_BTW.split(sizes, dim=-1), bias, strict=True)
        read_BTn, write_BTn, mix_BTm = (scale * raw + bias for scale, raw, bias in parts)
        mix_BTnn = sinkhorn(mix_BTm.unflatten(-1, (n, n)), SINKHORN_STEPS)
        read_BT1n, write_BTn1 = read_BTn.sigmoid().unsqueeze(-2), 2 * write_BTn.sigmoid().unsqueeze(-1)
        return read_BT1n.to(dtype), write_BTn1.to(dtype), mix_BTnn.to(dtype)


def sinkhorn(logits: Tensor, num_steps: int) -> Tensor:
    """exp(logits), (…, n, n), with its columns, then its rows, divided by their sums, `num_steps` times.

    It converges to a doubly stochastic matrix (Sinkhorn and Knopp 1967). Logarithms avoid overflow.
    """
    for _ in range(num_steps):
        logits = logits.log_softmax(dim=-2).log_softmax(dim=-1)
    return logits.exp()


HYPER_CONNECTIONS = Scheme(
    "hyper-connections",
    "H ← A_rᵀH + B⊗F(N(A_mᵀH)), 4 streams; A_m = e_{k mod 4}, A_r = I, B = 1 at the start",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Zhu et al. 2024, arXiv:2409.19606",
    join=Copies(lambda site, n: HyperConnection(site.width, n, (site.where.sublayer - 1) % n)),
)
MHC = Scheme(
    "mhc",
    "H ← RH + q⊗F(N(pᵀH)), 4 streams; R by 20 Sinkhorn steps, p = σ(·), q = 2σ(·)",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Xie et al. 2025, arXiv:2512.24880",
    join=Copies(lambda site, n: ManifoldConnection(site.width, n), mean=True),
)
