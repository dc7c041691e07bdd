"""Pairs of a model and its refactoring or port, for which nothing may be reported."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.diff.families import FAMILIES, Family, Size, State
from benchmarks.diff.plants import Build, Case, changed, converted, given
from benchmarks.diff.ports.blocks import ACTIVATIONS, Config, shown
from benchmarks.diff.ports.decoder import Port
from benchmarks.diff.ports.styles import Flat, Library, Nested, started
from benchmarks.diff.seen import for_neighbours

LIKE_LLAMA: dict[str, Any] = {
    "norm": "rms",
    "eps": 1e-6,
    "positions": "halves",
    "bias": False,
    "bias_out": False,
}
LIKE_LLAMA |= {"act": "silu", "gated": True, "tied": False, "fused": False}


class Wrapped(nn.Module):
    """A model inside another module, as trainers wrap it."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.model = inside

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(ids)
        return out


class Checkpointed(Port):
    """The decoder with activation checkpointing."""

    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


class Reversed(Port):
    """The decoder whose weights are drawn in the other order."""

    def __init__(self, config: Config):
        super().__init__(config)
        started(self, last_first=True)
        if config.tied:
            self.head.weight = self.tok.weight


class Functional(nn.Module):
    """The decoder as functions of a dictionary of parameters."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, d, h = config, config.width, config.hidden
        self.p = nn.ParameterDict({"wte": self._drawn(256, d), "wpe": self._drawn(66, d)})
        for each in range(config.depth):
            for name, shape in (("qkv", (3 * d, d)), ("proj", (d, d)), ("fc", (h, d)), ("out", (d, h))):
                self.p[f"h{each}_{name}_w"] = self._drawn(*shape)
                self.p[f"h{each}_{name}_b"] = nn.Parameter(torch.zeros(shape[0]))
        for name in [f"h{i}_ln{j}" for i in range(config.depth) for j in (1, 2)] + ["lnf"]:
            self.p[f"{name}_w"] = nn.Parameter(torch.ones(d))
            self.p[f"{name}_b"] = nn.Parameter(torch.zeros(d))

    @staticmethod
    def _drawn(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape).normal_(std=0.02))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.p[f"{name}_w"], self.p[f"{name}_b"], self.config.eps)

    def _map(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.p[f"{name}_w"], self.p[f"{name}_b"])

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.p["wte"]) + self.p["wpe"][: ids.shape[1]]
        for each in range(self.config.depth):
            qkv = self._map(self._norm(x, f"h{each}_ln1"), f"h{each}_qkv")
            q, k, v = qkv.view(*ids.shape, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
            seen = shown(ids.shape[1], self.config)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + self._map(mixed.transpose(1, 2).reshape(x.shape), f"h{each}_proj")
            inner = ACTIVATIONS[self.config.act](self._map(self._norm(x, f"h{each}_ln2"), f"h{each}_fc"))
            x = x + self._map(inner, f"h{each}_out")
        return self._norm(x, "lnf") @ self.p["wte"].T


def _fresh(size: Size) -> dict[str, tuple[Build, Build]]:
    """Pairs with fresh weights of one law."""
    base = Config(
        width=size.width, depth=size.depth, heads=size.heads, kv_heads=size.heads, hidden=size.hidden
    )
    gpt, llama = replace(base, act="gelu"), replace(base, **LIKE_LLAMA, kv_heads=size.heads // 2)
    post = replace(gpt, norm_in=False, norm_stream=True, norm_final=False)
    port, nested, flat, library = (partial(style, gpt) for style in (Port, Nested, Flat, Library))
    functional = partial(Functional, gpt)

    def both(a: Callable[..., nn.Module], b: Callable[..., nn.Module], config: Config) -> tuple[Build, Build]:
        return partial(a, config), partial(b, config)

    return {
        "fused q, k, v": (port, partial(Port, replace(gpt, fused=False))),
        "order of the fused parts": (port, partial(Port, replace(gpt, order=(2, 0, 1)))),
        "fused by head": (port, partial(Port, replace(gpt, by_head=True))),
        "written attention": (port, partial(Port, replace(gpt, written=False))),
        "branches in one list": (port, nested),
        "layers without modules": (port, flat),
        "nn.TransformerEncoder": (port, library),
        "functions of a dictionary": (port, functional),
        "functions and layers": (functional, flat),
        "functions and branches": (functional, nested),
        "layers and nn.TransformerEncoder": (flat, library),
        "branches and nn.TransformerEncoder": (nested, library),
        "Post-LN, nn.TransformerEncoder": both(Port, Library, post),
        "Post-LN, branches": both(Port, Nested, post),
        "ReLU, four layers": both(Port, Library, replace(gpt, act="relu", depth=4)),
        "weights drawn in another order": both(Port, Reversed, gpt),
        "branches drawn in another order": (nested, partial(Nested, gpt, last_first=True)),
        "wrapped": (port, lambda: Wrapped(Port(gpt))),
        "checkpointing": both(Port, Checkpointed, gpt),
        "untied": both(Port, Nested, replace(gpt, tied=False)),
        "gate and up fused, k and v fused": both(Port, Nested, llama),
        "gate second": both(Port, Nested, replace(llama, gate_first=False)),
        "GELU gate, all heads": both(Port, Nested, replace(llama, act="gelu", kv_heads=size.heads)),
        "LLaMA-like, fused": (partial(Port, llama), partial(Port, replace(llama, fused=True))),
        "branch scale": both(Port, Nested, replace(gpt, branch=0.5)),
        "attention scale": both(Port, Nested, replace(gpt, scale=0.125)),
        "embedding scale": both(Port, Nested, replace(gpt, embed=32**0.5)),
        "rotary with LayerNorm": both(Port, Nested, replace(gpt, positions="halves")),
        "neighbours": both(Port, Nested, replace(llama, positions="interleaved")),
        "no last norm": both(Port, Library, replace(gpt, norm_final=False)),
    }


def _consistent(family: Family, change: Callable[[State], None], seed: int, **options: Any) -> nn.Module:
    """A port whose options and whose weights were both changed, so that its function is the same."""
    return converted(replace(family, options=replace(family.options, **options)), (), seed, change)


def _regrouped(state: State) -> None:
    """Rows of the fused q, k and v in the order of heads."""
    for name in [name for name in state if ".wqkv." in name]:
        state[name] = state[name].unflatten(0, (3, -1, 8)).transpose(0, 1).flatten(0, 2)


def _split(state: State) -> None:
    """q, k and v of their own."""
    for name in [name for name in state if ".wqkv." in name]:
        for role, part in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace("wqkv", f"w{role}")] = part


def _by_neighbours(state: State) -> None:
    """Rows of q and k as the rotary positions of neighbours want them."""
    for role in "qk":
        changed(f"attn.w{role}.weight", for_neighbours)(state)


def _held(size: Size, seed: int) -> dict[str, tuple[Build, Build]]:
    """Pairs with the same weights, as a conversion leaves them."""
    gpt2, llama = (FAMILIES[name](size) for name in ("GPT-2", "LLaMA"))

    def of(family: Family, change: Callable[[State], None], **options: Any) -> tuple[Build, Build]:
        return partial(given, family.published, seed), partial(_consistent, family, change, seed, **options)

    return {
        "conversion: q, k, v by head": of(gpt2, _regrouped, by_head=True),
        "conversion: q, k, v split": of(gpt2, _split, fused=False),
        "conversion: PyTorch's attention": of(gpt2, lambda state: None, written=False),
        "conversion: rotary positions of neighbours": of(llama, _by_neighbours, positions="interleaved"),
        "conversion: wrapped": (
            partial(given, gpt2.published, seed),
            lambda: Wrapped(converted(gpt2, (), seed)),
        ),
    }


def parity(size: Size, seed: int) -> list[Case]:
    """Published models against their ports."""
    made: list[Case] = []
    for name, make in FAMILIES.items():
        family = make(size)
        a, b = partial(given, family.published, seed), partial(converted, family, (), seed)
        made.append(Case(f"parity: {name}", name, a, b))
    return made


def cases(size: Size, seed: int) -> list[Case]:
    """Refactorings, fresh and with weights."""
    pairs = _fresh(size) | _held(size, seed)
    return [Case(f"refactoring: {name}", "refactoring", a, b) for name, (a, b) in pairs.items()]
