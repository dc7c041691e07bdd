"""Learnt scales of the attention logits, by kind of QK-norm.

Shapes: B batch, T queries, S keys, H heads, G groups of keys, K width of a head.
"""

import math

import torch
from torch import Tensor, nn

from normscope.nn.linear import Gain
from normscope.nn.scheme import QKNorm

LOG_MAX = math.log(100)


class PlainScale(nn.Module):
    """No parameters; the logits are multiplied by 1/√K."""

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.default = head_width**-0.5

    def forward(self, q_BHTK: Tensor, k_BGSK: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, unchanged."""
        return q_BHTK, k_BGSK


class Temperature(nn.Module):
    """exp(min(log τ, ln 100)) times unit q, with one τ per head from 10 (Swin v2, arXiv:2111.09883)."""

    default = 1.0

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))

    def forward(self, q_BHTK: Tensor, k_BGSK: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled q, and k."""
        return q_BHTK * self.log_temperature.clamp(max=LOG_MAX).exp(), k_BGSK


class SphereGain(nn.Module):
    """s_qk times the features of unit q and k, from 1 (nGPT, arXiv:2410.01131); the logits are scaled by √K.

    Heads that share keys share s_qk.
    """

    def __init__(self, heads: int, kv_heads: int, head_width: int, width: int) -> None:
        super().__init__()
        self.default = head_width**0.5
        self.sharing = heads // kv_heads
        self.gain = Gain((kv_heads, 1, head_width), start=1.0, held=width**-0.5)

    def forward(self, q_BHTK: Tensor, k_BGSK: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, both scaled."""
        gain_G1K = self.gain()
        return q_BHTK * gain_G1K.repeat_interleave(self.sharing, dim=0), k_BGSK * gain_G1K


def logit_scale(kind: QKNorm | None, heads: int, kv_heads: int, head_width: int, width: int) -> nn.Module:
    """The module for a kind of QK-norm; its `default` is the factor on the logits."""
    if kind == "cosine":
        return Temperature(heads)
    if kind == "unit":
        return SphereGain(heads, kv_heads, head_width, width)
    return PlainScale(head_width)
