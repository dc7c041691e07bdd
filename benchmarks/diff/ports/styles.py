"""The decoder of `diff.ports.decoder` written in other ways, with the same law of the fresh weights.

`Nested` has the shape of x-transformers, `Flat` keeps all of a layer in one module, `Functional` has its
parameters in dictionaries, `Library` uses PyTorch's own modules throughout.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diff.ports.blocks import ACTIVATIONS, Config, rotated, shown


def started(model: nn.Module, *, last_first: bool = False) -> None:
    """Normal weights of deviation 0.02 and biases of zero, from the first module or from the last."""
    modules = list(model.modules())
    for module in reversed(modules) if last_first else modules:
        if isinstance(module, nn.Linear | nn.Embedding):
            with torch.no_grad():
                module.weight.copy_(torch.randn_like(module.weight) * 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def normed(config: Config) -> nn.Module:
    """PyTorch's norm."""
    make: Any = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return make(config.width, eps=config.eps)


class Residual(nn.Module):
    """x + f(norm(x)), or norm(x + f(x))."""

    def __init__(self, norm: nn.Module, inside: nn.Module, *, is_pre: bool, factor: float = 1.0):
        super().__init__()
        self.norm, self.inside, self.is_pre, self.factor = norm, inside, is_pre, factor

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_pre:
            return self.norm(x + self.inside(x))
        added = self.inside(self.norm(x))
        return x + (added if self.factor == 1 else self.factor * added)


class Heads(nn.Module):
    """Attention with q alone and k and v together."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, size = config, config.width // config.heads
        self.to_q = nn.Linear(config.width, config.width, bias=config.bias)
        self.to_kv = nn.Linear(config.width, 2 * size * config.kv_heads, bias=config.bias)
        self.to_out = nn.Sequential(
            nn.Linear(config.width, config.width, bias=config.bias_out), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        parts = (self.to_q(x), *self.to_kv(x).chunk(2, -1))
        q, k, v = (each.unflatten(-1, (-1, config.width // config.heads)).transpose(1, 2) for each in parts)
        if config.positions != "learnt":
            q, k = rotated(q, config), rotated(k, config)
        seen = shown(x.shape[1], config)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=config.scale, enable_gqa=config.heads != config.kv_heads
        )
        return self.to_out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, config: Config):
        super().__init__()
        self.both = nn.Linear(config.width, 2 * config.hidden, bias=config.bias_out)
        self.act, self.gate_first = ACTIVATIONS[config.act], config.gate_first

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1)
        return self.act(a) * b if self.gate_first else a * self.act(b)


class Act(nn.Module):
    """An activation as a module."""

    def __init__(self, name: str):
        super().__init__()
        self.act = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Nested(nn.Module):
    """Branches of all layers in one list, each within a residual module."""

    def __init__(self, config: Config, *, last_first: bool = False):
        super().__init__()
        self.config = config
        self.token_emb = nn.Embedding(config.vocabulary, config.width)
        self.pos_emb = None
        if config.positions == "learnt":
            self.pos_emb = nn.Embedding(config.length + 2, config.width)
        self.attn_layers = nn.ModuleList()
        for each in range(config.depth):
            own = config.at(each)
            for inside in (Heads(own), self._wide(own)):
                self.attn_layers.append(Residual(normed(own), inside, is_pre=own.norm_in, factor=own.branch))
        self.final_norm = normed(config) if config.norm_final else nn.Identity()
        self.to_logits = None
        if not config.tied:
            self.to_logits = nn.Linear(config.width, config.vocabulary, bias=False)
        started(self, last_first=last_first)

    @staticmethod
    def _wide(config: Config) -> nn.Module:
        down = nn.Linear(config.hidden, config.width, bias=config.bias_out)
        if config.gated:
            return nn.Sequential(Gated(config), nn.Dropout(0.0), down)
        up = nn.Linear(config.width, config.hidden, bias=config.bias_out)
        return nn.Sequential(nn.Sequential(up, Act(config.act)), nn.Dropout(0.0), down)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_emb(ids)
        if self.config.embed != 1:
            x = self.config.embed * x
        if self.pos_emb is not None:
            x = x + self.pos_emb.weight[self.config.shift : self.config.shift + ids.shape[1]]
        for layer in self.attn_layers:
            x = layer(x)
        x = self.final_norm(x)
        return x @ self.token_emb.weight.T if self.to_logits is None else self.to_logits(x)


class FlatLayer(nn.Module):
    """Two branches whose weights belong to the layer itself; the matrices are (in, out)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, d, h = config, config.width, config.hidden
        shapes = {
            "w_q": (d, d),
            "w_k": (d, d),
            "w_v": (d, d),
            "w_o": (d, d),
            "w_up": (d, h),
            "w_down": (h, d),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.02 * torch.randn(shape)))
            setattr(self, name.replace("w_", "b_"), nn.Parameter(torch.zeros(shape[1])))
        for number in "12":
            setattr(self, f"g_{number}", nn.Parameter(torch.ones(d)))
            setattr(self, f"h_{number}", nn.Parameter(torch.zeros(d)))

    g_1: Tensor
    h_1: Tensor
    g_2: Tensor
    h_2: Tensor
    w_q: Tensor
    b_q: Tensor
    w_k: Tensor
    b_k: Tensor
    w_v: Tensor
    b_v: Tensor
    w_o: Tensor
    b_o: Tensor
    w_up: Tensor
    b_up: Tensor
    w_down: Tensor
    b_down: Tensor

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        y = F.layer_norm(x, (config.width,), self.g_1, self.h_1, config.eps)
        q, k, v = (
            (y @ w + b).unflatten(-1, (config.heads, -1)).transpose(1, 2)
            for w, b in ((self.w_q, self.b_q), (self.w_k, self.b_k), (self.w_v, self.b_v))
        )
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        logits = logits + torch.zeros(logits.shape[-2:]).masked_fill(~shown(x.shape[1], config), -math.inf)
        mixed = torch.einsum("bhqk,bhkd->bqhd", logits.softmax(-1), v).flatten(2)
        x = x + mixed @ self.w_o + self.b_o
        y = F.layer_norm(x, (config.width,), self.g_2, self.h_2, config.eps)
        return x + ACTIVATIONS[config.act](y @ self.w_up + self.b_up) @ self.w_down + self.b_down


class Flat(nn.Module):
    """Layers without modules inside, as attributes of their own."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        tables = nn.Embedding(config.vocabulary, config.width), nn.Embedding(66, config.width)
        self.embed = nn.ModuleList(tables)
        for each in range(config.depth):
            self.add_module(f"layer{each}", FlatLayer(config.at(each)))
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        started(self)

    def forward(self, ids: Tensor) -> Tensor:
        words, places = (table.get_parameter("weight") for table in self.embed)
        x = words[ids] + places[: ids.shape[1]]
        for each in range(self.config.depth):
            x = getattr(self, f"layer{each}")(x)
        return F.linear(self.norm(x), words)


class Library(nn.Module):
    """`nn.TransformerEncoder` with a causal mask; q, k and v are one parameter.

    Args:
        stack: arguments of `nn.TransformerEncoderLayer` that differ from those of the decoder.
        last: whether there is a norm after the last layer.
    """

    def __init__(self, config: Config, *, last: bool | None = None, **stack: Any):
        super().__init__()
        act = {"gelu tanh": ACTIVATIONS["gelu tanh"], "gelu": F.gelu, "relu": F.relu}[config.act]
        known = {"dim_feedforward": config.hidden, "dropout": 0.0, "activation": act, "batch_first": True}
        known |= {"norm_first": config.norm_in, "layer_norm_eps": config.eps, "bias": config.bias}
        layer = nn.TransformerEncoderLayer(config.width, config.heads, **{**known, **stack})
        has_last = config.norm_final if last is None else last
        self.words, self.places = (nn.Embedding(n, config.width) for n in (config.vocabulary, 66))
        norm = nn.LayerNorm(config.width, eps=config.eps) if has_last else None
        self.stack = nn.TransformerEncoder(layer, config.depth, norm, enable_nested_tensor=False)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)
        started(self)
        for each in self.stack.layers:
            nn.init.normal_(each.self_attn.in_proj_weight, std=0.02)
            nn.init.zeros_(each.self_attn.in_proj_bias)
        if config.tied:
            self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(length))
        mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
        logits: Tensor = self.out(self.stack(x, mask=mask))
        return logits
