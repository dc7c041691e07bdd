"""OPT in fairseq's style for decoders, and a language model of gated convolutions in two styles."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.fourth.base import VOCABULARY, State, fused, renamed

WIDTH, HEADS, HIDDEN, LAYERS, KERNEL = 32, 4, 64, 2, 4


def opt(**changes: Any) -> nn.Module:
    """The published OPT."""
    sizes = {
        "hidden_size": WIDTH,
        "ffn_dim": HIDDEN,
        "num_hidden_layers": LAYERS,
        "word_embed_proj_dim": WIDTH,
    }
    rest = {"num_attention_heads": HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": 40}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 2, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **sizes, **rest, **none))


class DecoderLayer(nn.Module):
    """Layer of fairseq's decoder with its norms first."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation_fn = getattr(F, act)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, x, x, attn_mask=future, need_weights=False)
        x = residual + x
        residual = x
        x = self.activation_fn(self.fc1(self.final_layer_norm(x)))
        return residual + self.fc2(x)


class FairseqDecoder(nn.Module):
    """OPT in fairseq's style."""

    def __init__(self, start: int = 2, act: str = "relu") -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.embed_positions = nn.Embedding(42, WIDTH)
        self.layers = nn.ModuleList([DecoderLayer(act) for _ in range(LAYERS)])
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.start = start

    def forward(self, prev_output_tokens: Tensor) -> Tensor:
        n = prev_output_tokens.shape[1]
        places = torch.arange(n, device=prev_output_tokens.device) + self.start
        x = (self.embed_tokens(prev_output_tokens) + self.embed_positions(places)).transpose(0, 1)
        future = torch.triu(torch.ones(n, n, dtype=torch.bool, device=x.device), 1)
        for layer in self.layers:
            x = layer(x, future)
        return F.linear(self.layer_norm(x.transpose(0, 1)), self.embed_tokens.weight)


def to_decoder(state: State) -> State:
    """Fairseq's weights of OPT."""
    made = renamed(
        state,
        (r"^model\.decoder\.final_layer_norm", "layer_norm"),
        (r"^model\.decoder\.", ""),
        drop="lm_head",
    )
    name = "layers.{}.self_attn."
    fused(made, name + "in_proj_{}", *(name + f"{part}_proj.{{}}" for part in "qkv"))
    return made


class GatedConvolution(nn.Module):
    """Layer of Mamba's shape without its scan: a causal convolution, a gate, one residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.in_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.conv1d = nn.Conv1d(HIDDEN, HIDDEN, KERNEL, groups=HIDDEN, padding=KERNEL - 1)
        self.out_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(self.norm(hidden)).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)
        return hidden + self.out_proj(F.silu(x) * F.silu(z))


class GatedModel(nn.Module):
    """A language model of gated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([GatedConvolution() for _ in range(LAYERS)])
        self.norm_f = nn.RMSNorm(WIDTH, eps=1e-5)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


class SplitGated(nn.Module):
    """The same layer with two projections and a padded convolution by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.RMSNorm(WIDTH, eps=1e-5)
        self.value, self.gate = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, KERNEL, groups=HIDDEN)
        self.back = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        value = F.pad(self.value(y).mT, (KERNEL - 1, 0))
        mixed = F.conv1d(value, self.mix.weight, self.mix.bias, groups=HIDDEN).mT
        gate = self.gate(y)
        return x + self.back(mixed * torch.sigmoid(mixed) * gate * torch.sigmoid(gate))


class SplitGatedModel(nn.Module):
    """The same model as one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        norm, head = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), SplitGated(), SplitGated(), norm, head)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)


def to_split_gated(state: State) -> State:
    """The weights of two projections."""
    made = renamed(
        state,
        (r"^embedding", "net.0"),
        (r"^layers\.1", "net.2"),
        (r"^layers\.0", "net.1"),
        (r"^norm_f", "net.3"),
        (r"^lm_head", "net.4"),
        (r"\.norm\.", ".ln."),
        ("conv1d", "mix"),
        ("out_proj", "back"),
    )
    for i in (1, 2):
        value, gate = made.pop(f"net.{i}.in_proj.weight").chunk(2)
        made |= {f"net.{i}.value.weight": value, f"net.{i}.gate.weight": gate}
    return made
