"""Multi-head self-attention, causal or not.

Shapes: B batch, T tokens, D width, H heads, K width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import UsageError


class SelfAttention(nn.Module):
    """softmax(q kᵀ / √K) v for each head, then `o`.

    Args:
        width: D.
        heads: H; must divide D, and leave an even K for rotary positions.
        causal: whether a token sees only itself and earlier ones.
        rotary: rotate q and k by position (RoPE, Su et al. 2021, arXiv:2104.09864).
        dropout: of the attention weights, in train mode.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        rotary: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(
                f"heads={heads} for width={width}", "heads that divide the width", "change one of the two"
            )
        if rotary and (width // heads) % 2:
            raise UsageError(
                f"rotary positions with width/heads={width // heads}",
                "an even width of a head",
                "change heads",
            )
        self.heads, self.causal, self.rotary, self.dropout = heads, causal, rotary, dropout
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, width, bias=bias)
        self.v = nn.Linear(width, width, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q_BHTK, k_BHTK, v_BHTK = (self._split(project(x_BTD)) for project in (self.q, self.k, self.v))
        if self.rotary:
            q_BHTK, k_BHTK = rotate(q_BHTK), rotate(k_BHTK)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0
        )
        return self.o(y_BHTK.transpose(1, 2).flatten(2))

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def rotate(x_BHTK: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate the pair (x_i, x_{i+K/2}) of the token at t by the angle t·base^(-2i/K)."""
    num_tokens, width = x_BHTK.shape[-2:]
    half = width // 2
    # Angles in float32 at least: bfloat16 cannot count past 256.
    dtype = torch.promote_types(x_BHTK.dtype, torch.float32)
    frequency = base ** (-torch.arange(half, device=x_BHTK.device, dtype=dtype) / half)
    angle_Tk = torch.arange(num_tokens, device=x_BHTK.device, dtype=dtype)[:, None] * frequency
    cos, sin = angle_Tk.cos().to(x_BHTK.dtype), angle_Tk.sin().to(x_BHTK.dtype)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
