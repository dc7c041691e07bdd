"""GPT-2 in the styles of picoGPT and fairseq."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed
from benchmarks.diff.third.gpt import H, L, T, V, W, to_min


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def layer_norm(x: Tensor, g: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm from two means."""
    mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
    return g * (x - mean) / (square - mean**2 + eps) ** 0.5 + b


def linear(x: Tensor, p: Any) -> Tensor:
    """Product with a matrix as Conv1D has it."""
    return x @ p["w"] + p["b"]


def _params(n: int, m: int, std: float = 0.02) -> nn.ParameterDict:
    return nn.ParameterDict({"w": torch.randn(n, m) * std, "b": torch.zeros(m)})


def _gain() -> nn.ParameterDict:
    return nn.ParameterDict({"g": torch.ones(W), "b": torch.zeros(W)})


class PicoGPT(nn.Module):
    """GPT-2 in the style of picoGPT: functions over nested dicts of parameters, one head after the other."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        deep = 0.02 / math.sqrt(2 * L)
        self.slip = slip
        self.wte, self.wpe = nn.Parameter(torch.randn(V, W) * 0.02), nn.Parameter(torch.randn(T, W) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": _gain(),
                    "attn": nn.ModuleDict({"c_attn": _params(W, 3 * W), "c_proj": _params(W, W, deep)}),
                    "ln_2": _gain(),
                    "mlp": nn.ModuleDict({"c_fc": _params(W, 4 * W), "c_proj": _params(4 * W, W, deep)}),
                }
            )
            for _ in range(L)
        )
        self.ln_f = _gain()

    def mha(self, x: Tensor, p: Any) -> Tensor:
        qkv = linear(x, p["c_attn"]).chunk(3, dim=-1)
        mask = (1 - _tri(x.shape[1])) * -1e10
        heads = [part.chunk(H, dim=-1) for part in qkv]
        out = []
        for q, k, v in zip(*heads, strict=True):
            weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + mask, dim=-1)
            out.append(weights @ v)
        return linear(torch.cat(out[::-1] if self.slip == "heads backwards" else out, dim=-1), p["c_proj"])

    def ffn(self, x: Tensor, p: Any) -> Tensor:
        return linear(gelu(linear(x, p["c_fc"])), p["c_proj"])

    def block(self, x: Tensor, p: Any) -> Tensor:
        y = x + self.mha(layer_norm(x, **p["ln_1"]), p["attn"])
        source = x if self.slip == "parallel" else y
        return y + self.ffn(layer_norm(source, **p["ln_2"]), p["mlp"])

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.wte[inputs] + (0 if self.slip == "no positions" else self.wpe[range(inputs.shape[1])])
        for p in self.blocks:
            x = self.block(x, p)
        return layer_norm(x, **self.ln_f) @ self.wte.T


def _tri(n: int) -> Tensor:
    return torch.tril(torch.ones(n, n))


def to_pico(state: State) -> State:
    """The same arrays by other names."""
    ends = {"weight": "w", "bias": "b"}
    made = {"wte": state["transformer.wte.weight"], "wpe": state["transformer.wpe.weight"]}
    for name, value in state.items():
        if name.startswith(("transformer.h.", "transformer.ln_f")):
            rest, _, end = name.removeprefix("transformer.").rpartition(".")
            end = "g" if "ln_" in rest and end == "weight" else ends[end]
            made[f"{rest.replace('h.', 'blocks.', 1) if rest.startswith('h.') else rest}.{end}"] = value
    return made


class FairseqAttention(nn.Module):
    """Attention of fairseq: time first, scaled queries, bmm over batch × heads."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)
        self.out_proj = nn.Linear(W, W)
        self.scaling = 1.0 if slip == "no scale" else (W // H) ** -0.5

    def forward(self, query: Tensor, attn_mask: Tensor) -> Tensor:
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query) * self.scaling
        k, v = self.k_proj(query), self.v_proj(query)
        q, k, v = (each.contiguous().view(tgt_len, bsz * H, -1).transpose(0, 1) for each in (q, k, v))
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        attn_weights += attn_mask.unsqueeze(0)
        attn = torch.bmm(F.softmax(attn_weights, dim=-1), v)
        return self.out_proj(attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim))


class FairseqLayer(nn.Module):
    """Decoder layer with `normalize_before`."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.self_attn = FairseqAttention(slip)
        self.self_attn_layer_norm = nn.LayerNorm(W)
        self.fc1, self.fc2 = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)
        self.final_layer_norm = nn.LayerNorm(W)
        self.slip = slip

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + x

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        residual = x
        x = self.self_attn(self.self_attn_layer_norm(x), mask)
        x = self.residual_connection(x, residual)
        residual = x
        x = self.final_layer_norm(x)
        return self.residual_connection(self.mlp(x), residual)

    def mlp(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = x * torch.sigmoid(1.702 * x) if self.slip == "quick gelu" else F.gelu(x, approximate="tanh")
        return self.fc2(0.5 * x if self.slip == "halved" else x)


class Fairseq(nn.Module):
    """GPT-2 in the style of fairseq's TransformerDecoder, with a tied projection by F.linear."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(V, W), nn.Embedding(T, W)
        self.layers = nn.ModuleList([])
        self.layers.extend([FairseqLayer(slip) for _ in range(L)])
        self.layer_norm: nn.LayerNorm | None = nn.LayerNorm(W)
        self.slip = slip
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.constant_(p, 0.0)
            elif p.dim() == 2:
                deep = name.endswith(("out_proj.weight", "fc2.weight"))
                nn.init.normal_(p, mean=0, std=0.02 / math.sqrt(2 * L) if deep else 0.02)

    def forward(self, prev_output_tokens: Tensor) -> Tensor:
        n = prev_output_tokens.size(1)
        x = self.embed_tokens(prev_output_tokens) + self.embed_positions.weight[None, :n]
        x = x.transpose(0, 1)
        diagonal = 2 if self.slip == "sees the next" else 1
        mask = torch.triu(torch.zeros(n, n).fill_(float("-inf")).type_as(x), diagonal)
        for layer in self.layers:
            x = layer(x, mask)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        logits = F.linear(x.transpose(0, 1), self.embed_tokens.weight)
        return 30.0 * torch.tanh(logits / 30.0) if self.slip == "cap on the logits" else logits


FAIRSEQ = {
    "ln_1": "self_attn_layer_norm",
    "attn.c_proj": "self_attn.out_proj",
    "ln_2": "final_layer_norm",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}


def to_fairseq(state: State) -> State:
    """Three projections from the fused one."""
    made = renamed(
        state,
        {
            "transformer.wte": "embed_tokens",
            "transformer.wpe": "embed_positions",
            "transformer.ln_f": "layer_norm",
        },
    )
    for i, block in enumerate(blocks(to_min(state), "transformer.h")):
        made |= renamed(block, FAIRSEQ, f"layers.{i}.")
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", block[f"attn.c_attn.{kind}"].chunk(3), strict=True):
                made[f"layers.{i}.self_attn.{name}_proj.{kind}"] = part
    return made


STYLES = {
    "picoGPT": Style(
        PicoGPT,
        to_pico,
        ("blocks.{}",),
        ("blocks.{}.attn", "blocks.{}.ln_1"),
        ("blocks.{}.mlp", "blocks.{}.ln_2"),
        ("wte", "wpe"),
        ("ln_f", "wte"),
    ),
    "fairseq": Style(
        Fairseq,
        to_fairseq,
        ("layers.{}",),
        ("layers.{}.self_attn", "layers.{}.self_attn_layer_norm"),
        ("layers.{}.fc1", "layers.{}.fc2", "layers.{}.final_layer_norm"),
        ("embed_tokens", "embed_positions"),
        ("layer_norm", "embed_tokens"),
    ),
}
