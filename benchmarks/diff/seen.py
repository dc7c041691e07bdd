"""Planted differences that the authors of `normscope diff` may look at.

They follow reports of ports and conversions that went wrong: ε that was not passed on, gains of which the one
was added twice or never, neighbours and halves of rotary positions, q, k and v of a fused matrix in another
order, key heads that were tiled, lost ties, scales, masks and norms.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks.diff.families import Size, State
from benchmarks.diff.plants import Case, Plant, changed, configured, ported, rewritten, shifted
from benchmarks.diff.ports.blocks import Config
from benchmarks.diff.ports.decoder import Port
from benchmarks.diff.ports.styles import Library, Nested

SIZE = Size()


def moved_norms(old: str, new: str, layers: str = "") -> Plant:
    """Norms of all layers, or of one, in another place, with their weights."""

    def rename(state: State) -> None:
        for name in [name for name in state if f".{old}_" in name and name.startswith(f"layers.{layers}")]:
            state[name.replace(f".{old}_", f".{new}_")] = state.pop(name)

    where = f"layer {layers}" if layers else "all"
    return Plant("placement", where, {f"norm_{old}": False, f"norm_{new}": True}, loaded=rename)


def dropped(name: str, kind: str, where: str, **options: object) -> Plant:
    """An entry that the conversion forgets."""

    def forget(state: State) -> None:
        del state[name]

    return Plant(kind, where, options, loaded=forget)


def swapped(a: str, b: str) -> Plant:
    """Gate and up of a layer, each under the other's name."""

    def swap(state: State) -> None:
        state[a], state[b] = state[b], state[a]

    return Plant("gate and up", f"mlp {a.split('.')[1]}", loaded=swap)


def for_neighbours(weight: Tensor) -> Tensor:
    """The rows of q or k as rotary positions of neighbours want them, for heads of 8."""
    return weight.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)


def permuted(state: State) -> None:
    """Permute q and k of all layers."""
    for role in "qk":
        changed(f"self_attn.{role}_proj.weight", for_neighbours)(state)


def order(first: int, second: int, third: int, width: int = 32) -> partial[Tensor]:
    """Thirds of a fused tensor in another order."""
    return partial(_ordered, (first, second, third), width)


def _ordered(parts: tuple[int, ...], width: int, fused: Tensor) -> Tensor:
    return torch.cat([fused[each * width : (each + 1) * width] for each in parts])


def _fused(layer: int, *parts: int) -> Plant:
    def change(state: State) -> None:
        changed(f"layers.{layer}.attn.wqkv.weight", order(*parts))(state)
        changed(f"layers.{layer}.attn.wqkv.bias", order(*parts))(state)

    return Plant("order of q, k, v", f"attention {layer}", loaded=change)


GPT2 = [
    (Plant("ε", "all", {"eps": 1e-6}),),
    (Plant("ε", "layer 1", {"eps": 1e-12}),),
    (Plant("activation", "all mlp", {"act": "gelu"}),),
    (Plant("activation", "mlp 1", {"act": "relu"}),),
    (Plant("bias", "attention 1", {"bias": False}),),
    (Plant("attention scale", "attention 0", {"scale": 1.0}),),
    (Plant("attention scale", "all attention", {"scale": 1 / 8}),),
    (Plant("order of q, k, v", "all attention", {"order": (1, 0, 2)}),),
    (_fused(1, 2, 1, 0),),
    (Plant("order of heads", "all attention", {"by_head": True}),),
    (dropped("head.weight", "tied head", "last", tied=False),),
    (Plant("final norm", "last", {"norm_final": False}),),
    (Plant("positions", "first", {"shift": 2}),),
    (Plant("causal mask", "attention 1", {"mask": "none"}),),
    (Plant("causal mask", "all attention", {"mask": "strict"}),),
    (Plant("residual", "layer 1", {"residual": "normed"}),),
    (Plant("dropout", "attention 2", {"drop": 0.1}),),
    (Plant("parallel", "layer 1", {"parallel": True}),),
    (Plant("stop-gradient", "layer 0", {"detach": "branch input"}),),
    (Plant("branch scale", "all", {"branch": 6**-0.5}),),
    (moved_norms("in", "stream"),),
    (Plant("transposed weights", "attention 2", loaded=changed("layers.2.attn.wo.weight", Tensor.t)),),
    (Plant("scaled weights", "mlp 0", loaded=changed("layers.0.mlp.outer.weight", lambda w: w / 6**0.5)),),
    (Plant("ε", "layer 0", {"eps": 1e-3}), Plant("activation", "mlp 2", {"act": "gelu"})),
    (Plant("bias", "layer 1", {"bias_out": False}), Plant("final norm", "last", {"norm_final": False})),
    (Plant("positions", "first", {"shift": 1}), Plant("attention scale", "attention 2", {"scale": 0.5})),
]
LLAMA = [
    (Plant("rotary layout", "all attention", {"positions": "interleaved"}),),
    (Plant("rotary layout of the checkpoint", "all attention", state=permuted),),
    (Plant("rotary base", "all attention", {"base": 500000.0}),),
    (Plant("groups of heads", "all attention", {"tiled": True}),),
    (Plant("gate and up", "all mlp", {"gate_first": False}),),
    (swapped("layers.1.mlp.inner.weight", "layers.1.mlp.other.weight"),),
    (Plant("gain + 1", "all", {"gain": 1.0}),),
    (Plant("gain of the checkpoint", "all", state=shifted("norm.weight", 1.0)),),
    (Plant("activation", "all mlp", {"act": "gelu"}),),
    (Plant("norm kind", "layer 1", {"norm": "layer"}),),
    (Plant("window", "attention 2", {"window": 8}),),
    (
        Plant("rotary base", "all attention", {"base": 1000.0}),
        swapped("layers.2.mlp.inner.weight", "layers.2.mlp.other.weight"),
    ),
    (Plant("groups of heads", "attention 0", {"tiled": True}), Plant("ε", "layer 2", {"eps": 1e-3})),
]
BERT = [
    (Plant("ε", "everywhere", {"eps": 1e-5}),),
    (Plant("embedding part", "first", {"kinds": False}),),
    (Plant("activation", "last", {"head_act": "relu"}),),
    (moved_norms("stream", "in", "1"),),
    (Plant("activation", "all mlp", {"act": "gelu tanh"}),),
    (Plant("causal mask", "attention 1", {"mask": "causal"}),),
    (dropped("head.bias", "weights", "last"),),
    (Plant("gain of the checkpoint", "mlp 0", loaded=shifted("layers.0.stream_2.g", -1.0)),),
    (
        Plant("embedding part", "first", {"kinds": False}),
        Plant("attention scale", "attention 2", {"scale": 1.0}),
    ),
]
OLMO2 = [
    (Plant("QK-norm", "all attention", {"qk_norm": "head"}),),
    (Plant("QK-norm", "all attention", {"qk_norm": "none"}),),
    (moved_norms("out", "in"),),
    (Plant("ε", "all", {"eps": 1e-5}),),
    (Plant("activation", "mlp 0", {"act": "gelu"}), Plant("causal mask", "attention 2", {"mask": "none"})),
]


def _configured() -> list[Case]:
    return [
        configured("LLaMA", SIZE, "ε", "all", rms_norm_eps=1e-5),
        configured(
            "LLaMA", SIZE, "number of heads", "all attention", num_attention_heads=8, num_key_value_heads=4
        ),
        configured("GPT-2", SIZE, "attention scale", "all attention", scale_attn_weights=False),
        configured(
            "GPT-2", SIZE, "attention scale", "attention 1, attention 2", scale_attn_by_inverse_layer_idx=True
        ),
        configured("BERT", SIZE, "activation", "all mlp, last", hidden_act="relu"),
    ]


def _own() -> list[Case]:
    """Refactorings of the user's own decoder that went wrong, with fresh weights on both sides."""
    base = partial(Port, Config(act="gelu"))
    nested = lambda **changes: partial(Nested, Config(act="gelu", **changes))  # noqa: E731
    library = lambda act="gelu", **changes: partial(Library, Config(act=act), **changes)  # noqa: E731
    attention = [((f"layers.{i}.attn",), (f"stack.layers.{i}.self_attn",)) for i in range(3)]
    mlp = [((f"layers.{i}.mlp",), (f"stack.layers.{i}",)) for i in range(3)]
    both = [each for pair in zip(attention, mlp, strict=True) for each in pair]
    branches = [((f"layers.{i // 2}.{('attn', 'mlp')[i % 2]}",), (f"attn_layers.{i}",)) for i in range(6)]
    last = (("last", "head"), ("stack.norm", "stack", "out"))
    return [
        rewritten("nn.TransformerEncoder: ReLU", base, library("relu"), "activation", *mlp),
        rewritten("nn.TransformerEncoder: Post-LN", base, library(norm_first=False), "placement", *both),
        rewritten("nn.TransformerEncoder: no last norm", base, library(last=False), "final norm", last),
        rewritten("nn.TransformerEncoder: ε", base, library(layer_norm_eps=1e-6), "ε", *both),
        rewritten(
            "x-transformers-like: ε", base, nested(eps=1e-6), "ε", *branches, (("last",), ("final_norm",))
        ),
        rewritten("x-transformers-like: branch scale", base, nested(branch=0.5), "branch scale", *branches),
    ]


def cases() -> list[Case]:
    """All of them."""
    tables = {"GPT-2": GPT2, "LLaMA": LLAMA, "BERT": BERT, "OLMo-2": OLMO2}
    planted = [ported(name, SIZE, *plants) for name, table in tables.items() for plants in table]
    return [*planted, *_configured(), *_own()]
