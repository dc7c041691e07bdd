"""Hyper-Connections (Zhu et al. 2024, arXiv:2409.19606): n streams and learnt ways between them.

Shapes: B batch, T tokens, n streams, D width.
"""

import torch
from torch import Tensor, nn

from normscope.nn.joins import Copies, Norm, State, Update, streams_in_one
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme


class HyperConnection(nn.Module):
    """H ← A_rᵀH + B⊗F(A_mᵀH), each weight the sum of a static and a dynamic part.

    [A_m | A_r] = A + s_a·tanh(N(H) W_a) and B = b + s_b·tanh(N(H) w_b), N a LayerNorm of each stream. At the
    start W_a, w_b = 0, A_m = e_{k mod n}, A_r = I and b = 1: each stream is then the stream of Pre-LN.

    Args:
        first: the stream that is read at the start, k mod n for sublayer k, from 0.
        dynamic_scale: start of s_a and s_b.
    """

    def __init__(self, width: int, num_streams: int, first: int, dynamic_scale: float = 0.01) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        read = torch.zeros(num_streams, 1)
        read[first] = 1.0
        self.mix = nn.Parameter(torch.cat([read, torch.eye(num_streams)], dim=1))
        self.write = nn.Parameter(torch.ones(num_streams))
        self.dynamic_mix = nn.Parameter(torch.zeros(width, 1 + num_streams))
        self.dynamic_write = nn.Parameter(torch.zeros(width, 1))
        self.mix_scale = nn.Parameter(torch.full((1,), dynamic_scale))
        self.write_scale = nn.Parameter(torch.full((1,), dynamic_scale))

    def forward(self, state: State, update: Update, norm: Norm) -> Tensor:
        """(B, T, n, D) → (B, T, n, D)."""
        h_BTnD = streams_in_one(state, len(self.write))
        normed_BTnD = self.norm(h_BTnD)
        mix_BTnm = self.mix + self.mix_scale * torch.tanh(normed_BTnD @ self.dynamic_mix)
        write_BTn1 = self.write[:, None] + self.write_scale * torch.tanh(normed_BTnD @ self.dynamic_write)
        mixed_BTmD = mix_BTnm.mT @ h_BTnD
        f_BTD = update(mixed_BTmD[..., 0, :])
        return norm(mixed_BTmD[..., 1:, :] + write_BTn1 * f_BTD.unsqueeze(-2))


HYPER_CONNECTIONS = Scheme(
    "hyper-connections",
    "H ← A_rᵀH + B⊗F(N(A_mᵀH)), 4 streams; A_m = e_{k mod 4}, A_r = I, B = 1 at the start",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Zhu et al. 2024, arXiv:2409.19606",
    join=Copies(lambda site, n: HyperConnection(site.width, n, (site.where.sublayer - 1) % n)),
)
