"""Hyper-Connections (Zhu et al. 2024, arXiv:2409.19606): n streams and learnt ways between them.

Shapes: B batch, T tokens, n streams, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from normscope.nn.joins import Join, Norm, Site, State, Update, one_stream, streams_in_one
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme


@dataclass(frozen=True)
class HyperConnections(Join):
    """H ← A_rᵀH + B⊗F(A_mᵀH) on a state H (B, T, n, D); n copies of the embedding enter, their sum leaves.

    Attributes:
        num_streams: n.
        dynamic_scale: what the factors on the input-dependent parts start with.
    """

    kind: ClassVar[str] = "streams"
    num_streams: int = 4
    dynamic_scale: float = 0.01

    def build(self, site: Site) -> nn.Module:
        """The module; sublayer k, from 0, reads stream k mod n at the start."""
        first = (site.where.sublayer - 1) % self.num_streams
        return HyperConnection(site.width, self.num_streams, first, self.dynamic_scale)

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """n copies."""
        return entry_norm(x_BTD).unsqueeze(-2).expand(-1, -1, self.num_streams, -1)

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """The norm of the streams' sum."""
        return final_norm(one_stream(state).sum(dim=-2))


class HyperConnection(nn.Module):
    """H ← A_rᵀH + B⊗F(A_mᵀH), each weight the sum of a static and a dynamic part.

    [A_m | A_r] = A + s_a·tanh(N(H) W_a) and B = b + s_b·tanh(N(H) w_b), N a LayerNorm of each stream. At the
    start W_a, w_b = 0, A_m = e_{k mod n}, A_r = I and b = 1: each stream is then the stream of Pre-LN.
    """

    def __init__(self, width: int, num_streams: int, first: int, dynamic_scale: float) -> None:
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
    join=HyperConnections(),
)
