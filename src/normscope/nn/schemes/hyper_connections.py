"""n streams with learnt connections: Hyper-Connections, and mHC, mHC-lite and KromHC with doubly stochastic
mixing.

Shapes: B batch, T tokens, n streams, D width.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.joins import Copies, Norm, Site, State, Update, streams_in_one
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Scheme
from normscope.nn.tensors import wide

DYNAMIC_SCALE = 0.01
"""Initial value of the learnt factors on the input-dependent weights."""
SINKHORN_STEPS = 20
UNLIKELY = -8.0
"""Initial logit of every permutation but the identity, in mHC-lite and KromHC."""


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


class Mixing(nn.Module, ABC):
    """Base class of the maps from k logits to a doubly stochastic matrix (n, n)."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    @abstractmethod
    def identity(self) -> Tensor:
        """(k,), logits at which the matrix is nearly the identity."""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """(…, k) → (…, n, n)."""


class Sinkhorn(Mixing):
    """exp(logits), k = n², made doubly stochastic by 20 Sinkhorn steps (mHC)."""

    def identity(self) -> Tensor:
        return UNLIKELY * (1 - torch.eye(self.num_streams)).flatten()

    def forward(self, logits: Tensor) -> Tensor:
        return sinkhorn(logits.unflatten(-1, (self.num_streams, self.num_streams)), SINKHORN_STEPS)


class Permutations(Mixing):
    """Σ_r a_r P_r over all n! permutation matrices, a = softmax(logits), the identity first (mHC-lite)."""

    def __init__(self, num_streams: int) -> None:
        super().__init__(num_streams)
        orders = torch.tensor(list(itertools.permutations(range(num_streams))))
        self.matrices: Tensor
        self.register_buffer("matrices", torch.eye(num_streams)[orders], persistent=False)

    def identity(self) -> Tensor:
        return torch.tensor([0.0] + [UNLIKELY] * (len(self.matrices) - 1))

    def forward(self, logits: Tensor) -> Tensor:
        share = logits.softmax(dim=-1)
        mixed = share @ self.matrices.flatten(1).to(share.dtype)
        return mixed.unflatten(-1, (self.num_streams, self.num_streams))


class KroneckerFactors(Mixing):
    """U_1 ⊗ … ⊗ U_K, n = 2^K, each U a softmax-weighted sum of I and the 2 × 2 swap (KromHC)."""

    def identity(self) -> Tensor:
        return torch.tensor([0.0, UNLIKELY]).repeat(self.num_streams.bit_length() - 1)

    def forward(self, logits: Tensor) -> Tensor:
        share = logits.unflatten(-1, (-1, 2)).softmax(dim=-1)
        factors = torch.stack([share, share.flip(-1)], dim=-2).unbind(-3)  # [[p, 1 − p], [1 − p, p]]
        product = factors[0]
        for factor in factors[1:]:
            blocks = product[..., :, None, :, None] * factor[..., None, :, None, :]
            product = blocks.flatten(-4, -3).flatten(-2)
        return product


class ManifoldConnection(nn.Module):
    """H ← R H + q⊗F(pᵀH).

    With x̃ the RMS norm of all n·D entries of H and s a learnt factor for each of the three,
    p = σ(s_p x̃Φ_p + b_p), q = 2σ(s_q x̃Φ_q + b_q), R = mixing(s_R x̃Φ_R + b_R).

    Without `first`, Φ is Xavier-uniform and b = 0 (NVIDIA's Megatron): the start is near p = ½, q = 1,
    R = 1/n, and each stream near the Pre-LN stream. With it, Φ = 0, R is nearly the identity, b_p and b_q are
    1 for the stream `first` and −1 for the others, and x̃ has a learnt gain 1 + γ, γ = 0 (the
    authors' code of mHC-lite and KromHC, which draws `first` at random).

    Args:
        mixing: map to R.
        first: the stream that is read and written most initially.
    """

    def __init__(self, width: int, mixing: Mixing, first: int | None = None) -> None:
        super().__init__()
        self.mixing, self.num_streams = mixing, mixing.num_streams
        size, bias, ends = self.num_streams * width, mixing.identity(), torch.zeros(self.num_streams)
        weight = torch.zeros(2 * len(ends) + len(bias), size)
        if first is None:
            nn.init.xavier_uniform_(weight)
            bias.zero_()
        else:
            ends.fill_(-1.0)[first] = 1.0
        # No nn.Linear: its outputs do not grow with the width, so neither μP nor Muon applies.
        self.weights = nn.ParameterDict({"weight": weight, "bias": torch.cat([ends, ends, bias])})
        self.scales = nn.Parameter(torch.full((3,), DYNAMIC_SCALE))
        self.gain = None if first is None else nn.Parameter(torch.zeros(size))

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
        gain = None if self.gain is None else 1 + wide(self.gain)
        normed_BTX = F.rms_norm(x_BTX, x_BTX.shape[-1:], gain, eps=1e-6)
        raw_BTW = F.linear(normed_BTX, wide(self.weights["weight"]))
        sizes = (n, n, raw_BTW.shape[-1] - 2 * n)
        bias = wide(self.weights["bias"]).split(sizes)
        parts = zip(wide(self.scales), raw_BTW.split(sizes, dim=-1), bias, strict=True)
        read_BTn, write_BTn, mix_BTm = (scale * raw + bias for scale, raw, bias in parts)
        mix_BTnn = self.mixing(mix_BTm)
        read_BT1n, write_BTn1 = read_BTn.sigmoid().unsqueeze(-2), 2 * write_BTn.sigmoid().unsqueeze(-1)
        return read_BT1n.to(dtype), write_BTn1.to(dtype), mix_BTnn.to(dtype)


def sinkhorn(logits: Tensor, num_steps: int) -> Tensor:
    """exp(logits), (…, n, n), with its columns, then its rows, divided by their sums, `num_steps` times.

    It converges to a doubly stochastic matrix (Sinkhorn and Knopp 1967). Logarithms avoid overflow.
    """
    for _ in range(num_steps):
        logits = logits.log_softmax(dim=-2).log_softmax(dim=-1)
    return logits.exp()


def _first(site: Site, num_streams: int) -> int:
    """Index of the stream that sublayer k reads initially: k mod n, from 0."""
    return (site.where.sublayer - 1) % num_streams


HYPER_CONNECTIONS = Scheme(
    "hyper-connections",
    "H ← A_rᵀH + B⊗F(N(A_mᵀH)), 4 streams; A_m = e_{k mod 4}, A_r = I, B = 1 at the start",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Zhu et al. 2024, arXiv:2409.19606",
    join=Copies(lambda site, n: HyperConnection(site.width, n, _first(site, n))),
)
MHC = Scheme(
    "mhc",
    "H ← RH + q⊗F(N(pᵀH)), 4 streams; R by 20 Sinkhorn steps, p = σ(·), q = 2σ(·)",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Xie et al. 2025, arXiv:2512.24880",
    join=Copies(lambda site, n: ManifoldConnection(site.width, Sinkhorn(n)), mean=True),
)


def _nearly_identity(mixing: Callable[[int], Mixing]) -> Copies:
    """Join of streams whose R is doubly stochastic by construction, from `mixing(n)`."""
    return Copies(lambda site, n: ManifoldConnection(site.width, mixing(n), first=_first(site, n)))


MHC_LITE = Scheme(
    "mhc-lite",
    "H ← RH + q⊗F(N(pᵀH)), 4 streams; R = Σ softmax(·)_r P_r over the 24 permutations",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Yang and Gao 2026, arXiv:2601.05732, as in their code",
    join=_nearly_identity(Permutations),
)
KROMHC = Scheme(
    "kromhc",
    "H ← RH + q⊗F(N(pᵀH)), 4 streams; R = U₁ ⊗ U₂, each U = [[p, 1−p], [1−p, p]]",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Zhou et al. 2026, arXiv:2601.21579, as in their code",
    join=_nearly_identity(KroneckerFactors),
)
