"""Joins that read earlier states: the embedding (nanochat), or all outputs so far (Attention Residuals).

Shapes: B batch, T tokens, S sources, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from normscope.nn.joins import Built, Norm, Site, State, Update, several_streams, two_streams
from normscope.nn.norms import RMSNorm
from normscope.nn.placement import Rule, Slot, Where, norms_at, zero
from normscope.nn.scheme import Initialisation, Inside, Scheme

KEY_EPS = 1e-6
NUM_SUMS = 8
"""Sums over blocks in Block AttnRes, besides the embedding."""


@dataclass(frozen=True)
class KeepsEmbedding(Built):
    """A join whose state is (x, x₀), the stream and the embedding; the head reads x."""

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """(x, x₀) = (N(x₀), N(x₀))."""
        first_BTD = entry_norm(x_BTD)
        return first_BTD, first_BTD

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """N(x)."""
        return final_norm(two_streams(state)[0])


class EmbeddingBlend(nn.Module):
    """x ← λx + μx₀ before the first branch of a block, with one learnt λ and μ; x ← N(x + F(x)) at each.

    λ starts at 1.15 in the first block and at 1.05 in the last, μ at 0.20 and 0.05, linear between.
    """

    def __init__(self, where: Where) -> None:
        super().__init__()
        share = (where.block - 1) / max(where.num_blocks - 1, 1)
        blends = where.index == 0
        self.stream_scale = nn.Parameter(torch.full((1,), 1.15 - 0.10 * share)) if blends else None
        self.embedding_scale = nn.Parameter(torch.full((1,), 0.20 - 0.15 * share)) if blends else None

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """(x, x₀) → (x, x₀)."""
        x_BTD, first_BTD = two_streams(state)
        if self.stream_scale is not None and self.embedding_scale is not None:
            x_BTD = self.stream_scale * x_BTD + self.embedding_scale * first_BTD
        return norm(x_BTD + update(x_BTD)), first_BTD


@dataclass(frozen=True)
class KeepsOutputs(Built):
    """A join whose state is (h, v₀, v₁, …): the next branch's input, and the outputs so far from v₀, the
    embedding; the head reads h.
    """

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """(h, v₀) = (N(x₀), N(x₀))."""
        first_BTD = entry_norm(x_BTD)
        return first_BTD, first_BTD

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """N(h)."""
        return final_norm(several_streams(state)[0])


class DepthAttention(nn.Module):
    """h ← N(Σ_i α_i v_i), α = softmax_i(w·RMSNorm(v_i)), over all outputs v_i with this branch's.

    w is learnt and starts at 0: the first h are the means of the v_i. It is the query of the next branch, and
    after the last branch that of the head: with a single output, v₀, a query of the first branch would do
    nothing.

    Args:
        opens: whether F(h) is an output of its own; else it is added to the last one.
    """

    def __init__(self, width: int, *, opens: bool) -> None:
        super().__init__()
        self.opens = opens
        self.query = nn.Parameter(torch.zeros(width))
        self.key_norm = RMSNorm(width, eps=KEY_EPS)

    def forward(self, state: State, update: Update, norm: Norm) -> State:
        """(h, v₀, …) → (h, v₀, …)."""
        h_BTD, *outputs = several_streams(state)
        f_BTD = update(h_BTD)
        outputs = [*outputs, f_BTD] if self.opens else [*outputs[:-1], outputs[-1] + f_BTD]
        values_BTSD = torch.stack(outputs, dim=-2)
        logits_BTS = (self.key_norm(values_BTSD) * self.query).sum(dim=-1)
        shares_BT1S = logits_BTS.softmax(dim=-1).unsqueeze(-2)
        return norm((shares_BT1S @ values_BTSD).squeeze(-2)), *outputs


def block_size(num_blocks: int) -> int:
    """Blocks of the stack that Block AttnRes sums into one output, for 8 sums at most."""
    return -(-num_blocks // NUM_SUMS)


def _starts_a_sum(where: Where) -> bool:
    return where.index == 0 and (where.block - 1) % block_size(where.num_blocks) == 0


def _attention_over_depth(opens: Callable[[Where], bool]) -> KeepsOutputs:
    def make(site: Site) -> nn.Module:
        return DepthAttention(site.width, opens=opens(site.where))

    return KeepsOutputs("streams", make)


_point_four: Rule = lambda where: 0.4  # noqa: E731

NANOCHAT = Scheme(
    "nanochat",
    "x ← λx + μx₀ at each block, x₀ = N(embedding), then x + F(N(x)), N an RMSNorm, with norms on q and k",
    norms_at(Slot.ENTRY, Slot.BRANCH_IN, Slot.FINAL),
    "karpathy/nanochat, July 2026; without its value embeddings, smear, backout and windows",
    join=KeepsEmbedding("learnt", lambda site: EmbeddingBlend(site.where)),
    initialisation=Initialisation(
        "fan-in", MappingProxyType({"o": zero, "down": zero, "up": _point_four, "gate": _point_four})
    ),
    inside=Inside(qk_norm="head"),
    norm="rmsnorm",
)
ATTNRES = Scheme(
    "attnres",
    "h_l = Σ_{i<l} α_i v_i, α = softmax_i(w_l·RMSNorm(v_i)), w = 0 at the start; v_l = F(N(h_l)), v_0 = x_0",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Kimi Team 2026 (Attention Residuals), arXiv:2603.15031",
    join=_attention_over_depth(lambda where: True),
)
BLOCK_ATTNRES = Scheme(
    "block-attnres",
    "as attnres, with the branches of ⌈L/8⌉ blocks summed into one v",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Kimi Team 2026 (Attention Residuals), arXiv:2603.15031",
    join=_attention_over_depth(_starts_a_sum),
)
