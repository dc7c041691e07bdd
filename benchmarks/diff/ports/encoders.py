"""BERT and ViT as a user ports them, from the blocks of the decoder, and the conversions of their weights.

`changes` of a port are options of `Config`, and of the port itself: see each class.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from benchmarks.diff.ports.blocks import ACTIVATIONS, Config, Norm
from benchmarks.diff.ports.decoder import Layer

State = dict[str, Tensor]
BERT = Config(
    norm_in=False, norm_stream=True, mask="none", eps=1e-12, act="gelu", fused=False, norm_final=False
)
VIT = Config(mask="none", eps=1e-12, act="gelu", tied=False, length=17)


def _start(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class BertPort(nn.Module):
    """Masked language model, ids (B, T) → logits (B, T, V).

    Args:
        kinds: whether the embedding of token types is added.
        head_act: activation of the head.
    """

    def __init__(self, config: Config, *, kinds: bool = True, head_act: str = "gelu", shift: int = 0):
        super().__init__()
        self.config, self.has_kinds, self.head_act, self.shift = config, kinds, head_act, shift
        self.tok, self.pos = (nn.Embedding(n, config.width) for n in (config.vocabulary, config.length + 2))
        self.kind = nn.Embedding(2, config.width)
        self.first = Norm(config)
        self.layers = nn.ModuleList(Layer(config.at(each)) for each in range(config.depth))
        self.dense, self.last = nn.Linear(config.width, config.width), Norm(config)
        self.head = nn.Linear(config.width, config.vocabulary)
        _start(self)
        if config.tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]) + self.shift)
        if self.has_kinds:
            x = x + self.kind(torch.zeros_like(ids))
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.last(ACTIVATIONS[self.head_act](self.dense(x))))
        return logits


def bert(**changes: Any) -> nn.Module:
    """BERT of transformers."""
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    rest = {"intermediate_size": 80, "max_position_embeddings": 66, "attn_implementation": "sdpa"}
    return BertForMaskedLM(BertConfig(**{**sizes, **rest, **changes}))


_BERT = {
    "attention.self.query": "attn.wq",
    "attention.self.key": "attn.wk",
    "attention.self.value": "attn.wv",
    "attention.output.dense": "attn.wo",
    "intermediate.dense": "mlp.inner",
    "output.dense": "mlp.outer",
}


def from_bert(state: State, config: Config) -> State:
    """State of BERT → state of the port."""
    made = {
        f"{ours}.weight": state[f"bert.embeddings.{theirs}_embeddings.weight"]
        for ours, theirs in (("tok", "word"), ("pos", "position"), ("kind", "token_type"))
    }
    norms = {"bert.embeddings.LayerNorm": "first", "cls.predictions.transform.LayerNorm": "last"}
    pairs = {"cls.predictions.transform.dense": "dense", "cls.predictions.decoder": "head"}
    for each in range(config.depth):
        old, new = f"bert.encoder.layer.{each}", f"layers.{each}"
        norms[f"{old}.attention.output.LayerNorm"] = f"{new}.stream_1"
        norms[f"{old}.output.LayerNorm"] = f"{new}.stream_2"
        pairs |= {f"{old}.{theirs}": f"{new}.{ours}" for theirs, ours in _BERT.items()}
    return made | moved(state, norms, pairs)


def moved(state: State, norms: Mapping[str, str], pairs: Mapping[str, str]) -> State:
    """Norms and linear layers under their new names."""
    made: State = {}
    for theirs, ours in norms.items():
        made |= {f"{ours}.g": state[f"{theirs}.weight"], f"{ours}.b": state[f"{theirs}.bias"]}
    for theirs, ours in pairs.items():
        made |= {f"{ours}.{leaf}": state[f"{theirs}.{leaf}"] for leaf in ("weight", "bias")}
    return made


class VitPort(nn.Module):
    """Classifier of images (B, 3, 16, 16).

    Args:
        placed: whether positions are added.
        pooled: "first" reads the class token, "mean" averages the patches.
    """

    def __init__(self, config: Config, *, placed: bool = True, pooled: str = "first"):
        super().__init__()
        self.config, self.is_placed, self.pooled = config, placed, pooled
        self.patch = nn.Conv2d(3, config.width, 4, 4)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, config.width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, config.length, config.width))
        self.layers = nn.ModuleList(Layer(config.at(each)) for each in range(config.depth))
        self.last, self.head = Norm(config), nn.Linear(config.width, 2)
        _start(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1)
        x = x + self.pos if self.is_placed else x
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        logits: Tensor = self.head(x[:, 0] if self.pooled == "first" else x[:, 1:].mean(1))
        return logits


def vit(**changes: Any) -> nn.Module:
    """ViT of transformers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
    return ViTForImageClassification(ViTConfig(**{**sizes, "image_size": 16, "patch_size": 4, **changes}))


def from_vit(state: State, config: Config) -> State:
    """State of ViT → state of the port, whose q, k and v are one matrix."""
    made = {"cls": state["vit.embeddings.cls_token"], "pos": state["vit.embeddings.position_embeddings"]}
    norms = {"vit.layernorm": "last"}
    pairs = {"vit.embeddings.patch_embeddings.projection": "patch", "classifier": "head"}
    for each in range(config.depth):
        old, new = f"vit.layers.{each}", f"layers.{each}"
        norms |= {f"{old}.layernorm_before": f"{new}.in_1", f"{old}.layernorm_after": f"{new}.in_2"}
        pairs |= {f"{old}.attention.o_proj": f"{new}.attn.wo", f"{old}.mlp.fc1": f"{new}.mlp.inner"}
        pairs |= {f"{old}.mlp.fc2": f"{new}.mlp.outer"}
        for leaf in ("weight", "bias"):
            parts = [state[f"{old}.attention.{role}_proj.{leaf}"] for role in "qkv"]
            made[f"{new}.attn.wqkv.{leaf}"] = torch.cat(parts)
    return made | moved(state, norms, pairs)
