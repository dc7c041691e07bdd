"""GPT-2 in the style of the Annotated Transformer."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed
from benchmarks.diff.third.gpt import H, L, T, V, W, to_min


def clones(module: nn.Module, n: int) -> nn.ModuleList:
    """Copies of a module."""
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class HandNorm(nn.Module):
    """LayerNorm by hand, in the names of the Annotated Transformer."""

    def __init__(self, features: int, slip: str) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.slip == "rms":
            return self.a_2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) + self.b_2
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.a_2 * (x - mean) / torch.sqrt(var + 1e-5) + self.b_2


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    p_attn = scores.masked_fill(mask == 0, -1e9).softmax(dim=-1)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    """Attention with four copies of a Linear."""

    def __init__(self, h: int, d_model: int, slip: str) -> None:
        super().__init__()
        self.d_k, self.h, self.slip = d_model // h, h, slip
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        n = query.size(0)
        query, key, value = (
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))  # noqa: B905
        )
        x, self.attn = attention(query, key, value, mask.unsqueeze(1))
        return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))


class SublayerConnection(nn.Module):
    """Residual connection around a norm and a branch."""

    def __init__(self, size: int, slip: str) -> None:
        super().__init__()
        self.norm, self.dropout = HandNorm(size, slip), nn.Dropout(0.0)

    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class DecoderLayer(nn.Module):
    """Self-attention and feed-forward with two connections."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(H, W, slip)
        act = nn.ReLU() if slip == "relu" else nn.GELU(approximate="tanh")
        self.feed_forward = nn.Sequential(nn.Linear(W, 4 * W), act, nn.Linear(4 * W, W))
        self.sublayer = clones(SublayerConnection(W, slip), 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class Annotated(nn.Module):
    """GPT-2 in the style of the Annotated Transformer."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.lut, self.places = nn.Embedding(V, W), nn.Embedding(T, W)
        self.layers = clones(DecoderLayer(slip), L)
        self.norm = HandNorm(W, slip)
        self.proj = nn.Linear(W, V, bias=slip == "bias of the head")
        self.proj.weight = self.lut.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith(("linears.3.weight", "feed_forward.2.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * L))
            elif ".bias" in name and "norm" not in name:
                nn.init.zeros_(p)

    def forward(self, tgt: Tensor) -> Tensor:
        size = tgt.shape[1]
        mask = torch.triu(torch.ones((1, size, size)), diagonal=1).type(torch.uint8) == 0
        x = self.lut(tgt) + self.places.weight[:size]
        for layer in self.layers:
            x = layer(x, mask)
        return self.proj(self.norm(x))


def to_annotated(state: State) -> State:
    """The fused projection split, and all renamed."""
    made: State = {}
    for i, block in enumerate(blocks(to_min(state), "transformer.h")):
        for kind in ("weight", "bias"):
            for j, part in enumerate(block.pop(f"attn.c_attn.{kind}").chunk(3)):
                block[f"linears.{j}.{kind}"] = part
        for end in ("1", "2"):
            for new, known in (("a_2", "weight"), ("b_2", "bias")):
                made[f"layers.{i}.sublayer.{int(end) - 1}.norm.{new}"] = block.pop(f"ln_{end}.{known}")
        names = {
            "linears": "self_attn.linears",
            "attn.c_proj": "self_attn.linears.3",
            "mlp.c_fc": "feed_forward.0",
            "mlp.c_proj": "feed_forward.2",
        }
        made |= renamed(block, names, f"layers.{i}.")
    head = {"transformer.wte": "lut", "transformer.wpe": "places", "lm_head": "proj"}
    made |= renamed(state, head)
    made |= renamed(state, {"transformer.ln_f.weight": "norm.a_2", "transformer.ln_f.bias": "norm.b_2"})
    return made


STYLES = {
    "annotated": Style(
        Annotated,
        to_annotated,
        ("layers.{}",),
        ("layers.{}.self_attn", "layers.{}.sublayer.0"),
        ("layers.{}.feed_forward", "layers.{}.sublayer.1"),
        ("lut", "places"),
        ("norm", "proj"),
    ),
}
