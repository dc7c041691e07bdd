"""T5 as a user ports it, and the conversion of its weights.

The port has the pieces of the published model in one class each, and the names of none of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.diff.ports.blocks import ACTIVATIONS, Config, Norm

State = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """Options of the port, of all layers unless `layers` says otherwise: "encoder.1" → options.

    Attributes:
        scale: factor of the attention logits; T5 has none.
        two_ways: stacks whose positions tell left from right.
        far: distance from which on all positions fall into one bucket.
        scaled_head: whether the tied head divides the stream by √d.
    """

    width: int = 32
    depth: int = 2
    heads: int = 4
    hidden: int = 80
    vocabulary: int = 256
    eps: float = 1e-6
    scale: float = 1.0
    two_ways: tuple[str, ...] = ("encoder",)
    far: int = 20
    buckets: int = 8
    act: str = "relu"
    scaled_head: bool = True
    residual: str = "stream"
    norm_last: tuple[str, ...] = ("encoder", "decoder")
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def at(self, layer: str) -> "Options":
        """The options of one layer."""
        return replace(self, **self.layers.get(layer, {}))

    @property
    def norm(self) -> Config:
        """The same for `Norm`."""
        return Config(width=self.width, norm="rms", eps=self.eps)


class Relative(nn.Module):
    """Learnt bias of the attention logits by distance, (H, T, T)."""

    def __init__(self, options: Options, stack: str):
        super().__init__()
        self.options, self.two_ways = options, stack in options.two_ways
        self.table = nn.Parameter(0.02 * torch.randn(options.buckets, options.heads))

    def forward(self, length: int) -> Tensor:
        ahead = torch.arange(length) - torch.arange(length)[:, None]
        count, start = self.options.buckets, torch.zeros_like(ahead)
        if self.two_ways:
            count //= 2
            start, far = (ahead > 0) * count, ahead.abs()
        else:
            far = (-ahead).clamp(min=0)
        half = count // 2
        ratio = (far.clamp(min=1) / half).log() / math.log(self.options.far / half)
        late = (half + (ratio * (count - half)).long()).clamp(max=count - 1)
        return self.table[start + torch.where(far < half, far, late)].permute(2, 0, 1)


class Mix(nn.Module):
    """Attention without biases, over its own stream or over the encoder's."""

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(options.width, options.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, memory: Tensor, added: Tensor) -> Tensor:
        q, k, v = (
            weight(y).unflatten(-1, (self.options.heads, -1)).transpose(1, 2)
            for weight, y in ((self.wq, x), (self.wk, memory), (self.wv, memory))
        )
        logits = q @ k.transpose(-1, -2) * self.options.scale + added
        return self.wo((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Wide(nn.Module):
    """Feed-forward layer without biases."""

    def __init__(self, options: Options):
        super().__init__()
        self.inner = nn.Linear(options.width, options.hidden, bias=False)
        self.outer = nn.Linear(options.hidden, options.width, bias=False)
        self.act = ACTIVATIONS[options.act]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.act(self.inner(x)))


class Level(nn.Module):
    """A layer of the encoder, or of the decoder, which reads the encoder as well."""

    def __init__(self, options: Options, stack: str):
        super().__init__()
        self.options, self.is_crossed = options, stack == "decoder"
        self.mix, self.mix_norm = Mix(options), Norm(options.norm)
        if self.is_crossed:
            self.cross, self.cross_norm = Mix(options), Norm(options.norm)
        self.wide, self.wide_norm = Wide(options), Norm(options.norm)

    def forward(self, x: Tensor, memory: Tensor | None, added: Tensor) -> Tensor:
        normed = self.mix_norm(x)
        x = (normed if self.options.residual == "normed" else x) + self.mix(normed, normed, added)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, torch.zeros_like(added[..., :1, :1]))
        return x + self.wide(self.wide_norm(x))


class Stack(nn.Module):
    """The encoder or the decoder, from embeddings to its last norm."""

    def __init__(self, options: Options, stack: str):
        super().__init__()
        self.is_causal = stack == "decoder"
        self.places = Relative(options, stack)
        self.levels = nn.ModuleList(
            Level(options.at(f"{stack}.{each}"), stack) for each in range(options.depth)
        )
        self.last = Norm(options.norm) if stack in options.norm_last else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        added = self.places(x.shape[1])
        if self.is_causal:
            added = added + torch.full_like(added[0], -math.inf).triu(1)
        for level in self.levels:
            x = level(x, memory, added)
        out: Tensor = self.last(x)
        return out


class T5Port(nn.Module):
    """The port: ids of both sides → logits (B, T, V)."""

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.tok = nn.Embedding(options.vocabulary, options.width)
        self.encoder, self.decoder = Stack(options, "encoder"), Stack(options, "decoder")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.encoder(self.tok(input_ids))
        x = self.decoder(self.tok(decoder_input_ids), memory)
        x = x * self.options.width**-0.5 if self.options.scaled_head else x
        return F.linear(x, self.tok.weight)


def t5(**changes: Any) -> nn.Module:
    """T5 of transformers."""
    sizes = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 4}
    rest = {"decoder_start_token_id": 0, "dropout_rate": 0.0, "relative_attention_num_buckets": 8}
    rest |= {"relative_attention_max_distance": 20}
    return T5ForConditionalGeneration(T5Config(**{**sizes, **rest, **changes}))


_MIX = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}


def from_t5(state: State, options: Options) -> State:
    """State of T5 → state of the port."""
    made = {"tok.weight": state["shared.weight"]}
    for stack, branches in (("encoder", ("mix", "wide")), ("decoder", ("mix", "cross", "wide"))):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        made[f"{stack}.places.table"] = state[f"{first}.relative_attention_bias.weight"]
        made[f"{stack}.last.g"] = state[f"{stack}.final_layer_norm.weight"]
        for each in range(options.depth):
            for number, branch in enumerate(branches):
                old, new = f"{stack}.block.{each}.layer.{number}", f"{stack}.levels.{each}.{branch}"
                made[f"{new}_norm.g"] = state[f"{old}.layer_norm.weight"]
                names = {"wi": "inner", "wo": "outer"} if branch == "wide" else _MIX
                inside = {"mix": "SelfAttention", "cross": "EncDecAttention", "wide": "DenseReluDense"}[
                    branch
                ]
                made |= {f"{new}.{b}.weight": state[f"{old}.{inside}.{a}.weight"] for a, b in names.items()}
    return made
