"""Planted differences of other architectures, sizes and seeds; nobody tunes `normscope diff` on them."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.diff.families import Places, Size, State
from benchmarks.diff.plants import Case, Plant, changed, configured, ported, rewritten, shifted
from benchmarks.diff.ports.blocks import Config
from benchmarks.diff.ports.decoder import Port
from benchmarks.diff.ports.styles import Flat, Library, Nested
from benchmarks.diff.seen import dropped, moved_norms, swapped

SIZE = Size(width=48, depth=2, heads=6, hidden=96)
SEED = 23


def tied(state: State) -> None:
    """The head's weights are the embedding's."""
    state["head.weight"] = state["tok.weight"]


def reversed_heads(weight: Tensor) -> Tensor:
    """Columns of the output projection, heads of 8 in reverse order."""
    return weight.unflatten(1, (-1, 8)).flip(1).flatten(1, 2)


GPT2 = [
    (Plant("activation", "mlp 0", {"act": "quick gelu"}),),
    (Plant("activation", "all mlp", {"act": "relu squared"}),),
    (Plant("order of q, k, v", "attention 1", {"order": (2, 0, 1)}),),
    (Plant("order of heads", "attention 0", {"by_head": True}),),
    (Plant("bias", "layer 0", {"bias_out": False}),),
    (Plant("dropout", "attention 0", {"drop": 0.2, "written": False}),),
    (Plant("window", "attention 1", {"window": 16}),),
    (Plant("stop-gradient", "layer 1", {"detach": "branch input"}),),
    (Plant("gradient", "layer 0", {"gradient": 0.5}),),
    (Plant("placement", "layer 1", {"norm_out": True}),),
    (Plant("embedding scale", "first", {"embed": 48**0.5}),),
    (Plant("transposed weights", "attention 0", loaded=changed("layers.0.attn.wo.weight", Tensor.t)),),
    (Plant("branch scale", "layer 1", {"branch": 0.5}),),
    (Plant("positions", "first", {"shift": 1}), Plant("bias", "attention 1", {"bias": False})),
    (Plant("ε", "layer 0", {"eps": 1e-2}), Plant("ε", "layer 1", {"eps": 1e-3})),
]
LLAMA = [
    (Plant("rotary layout", "attention 1", {"positions": "interleaved"}),),
    (Plant("rotary base", "all attention", {"base": 1e6}),),
    (Plant("causal mask", "attention 0", {"mask": "strict"}),),
    (Plant("groups of heads", "attention 1", {"tiled": True}),),
    (Plant("gain + 1", "layer 1", {"gain": 1.0}),),
    (Plant("gain of the checkpoint", "mlp 1", loaded=shifted("layers.1.in_2.g", 1.0)),),
    (Plant("residual", "layer 0", {"residual": "normed"}),),
    (Plant("final norm", "last", {"norm_final": False}),),
    (Plant("logit cap", "all attention", {"cap": 5.0}),),
    (Plant("tied head", "last", {"tied": True}, loaded=tied),),
    (Plant("activation", "mlp 1", {"act": "relu"}),),
    (Plant("attention scale", "all attention", {"scale": 1 / 64}),),
    (Plant("order of heads", "attention 0", loaded=changed("layers.0.attn.wo.weight", reversed_heads)),),
    (swapped("layers.0.mlp.inner.weight", "layers.0.mlp.other.weight"),),
    (Plant("embedding scale", "first", {"embed": 48**0.5}), Plant("window", "attention 1", {"window": 8})),
]
GEMMA2 = [
    (Plant("gain + 1", "all", {"gain": 0.0}),),
    (Plant("embedding scale", "first", {"embed": 1.0}),),
    (Plant("attention scale", "all attention", {"scale": None}),),
    (Plant("logit cap", "all attention", {"cap": None}),),
    (Plant("output cap", "last", {"cap_final": None}),),
    (Plant("window", "attention 0", {"window": 17}),),
    (Plant("window", "attention 0", {"window": None}),),
    (Plant("activation", "all mlp", {"act": "gelu"}),),
    (Plant("placement", "all", {"norm_out": False}),),
    (Plant("ε", "all", {"eps": 1e-5}),),
    (Plant("embedding scale", "first", {"embed": 1.0}), Plant("output cap", "last", {"cap_final": None})),
    (Plant("logit cap", "attention 0", {"cap": None}), Plant("activation", "mlp 1", {"act": "silu"})),
]
T5 = [
    (Plant("attention scale", "attention 1", {"scale": 8**-0.5}),),
    (Plant("position table", "all attention", {"two_ways": ()}),),
    (Plant("position table", "all attention, all decoder", {"far": 64}),),
    (Plant("activation", "mlp 1", {"act": "gelu"}),),
    (Plant("head scale", "last", {"scaled_head": False}),),
    (Plant("final norm", "last", {"norm_last": ("encoder",)}),),
    (Plant("ε", "layer 0", {"eps": 1e-4}),),
    (Plant("residual", "attention 1", {"residual": "normed"}),),
    (Plant("activation", "mlp 0", {"act": "silu"}), Plant("head scale", "last", {"scaled_head": False})),
]
VIT = [
    (Plant("positions missing", "first", {"placed": False}),),
    (Plant("pooling", "last", {"pooled": "mean"}),),
    (Plant("ε", "all", {"eps": 1e-6}),),
    (Plant("activation", "all mlp", {"act": "quick gelu"}),),
    (Plant("order of q, k, v", "all attention", {"order": (1, 2, 0)}),),
    (Plant("bias", "all attention", {"bias": False}),),
    (Plant("causal mask", "all attention", {"mask": "causal"}),),
    (moved_norms("in", "stream"),),
    (Plant("attention scale", "attention 1", {"scale": 1.0}),),
    (Plant("positions missing", "first", {"placed": False}), Plant("activation", "mlp 1", {"act": "relu"})),
]
BERT: list[tuple[Plant, ...]] = [
    (dropped("kind.weight", "weights", "first"),),
    (Plant("ε", "layer 1", {"eps": 1e-3}),),
    (Plant("number of heads", "all attention", {"heads": 3, "kv_heads": 3}),),
]
OLMO2: list[tuple[Plant, ...]] = [
    (Plant("QK-norm", "attention 1", {"qk_norm": "none"}),),
    (moved_norms("out", "stream"),),
    (Plant("rotary base", "all attention", {"base": 500000.0}),),
]


def _nn(change: str, kind: str, *places: str, base: str = ",heads=4") -> Case:
    """Models of `normscope.nn`, fresh."""
    spec = "nn:decoder,depth=3,width=32" + base
    sites = [((place,), (place,)) for place in places]
    return rewritten(f"nn: {change}", spec, f"{spec},{change}", kind, *sites)


def _models() -> list[Case]:
    branches = [f"blocks.{i}.{branch}" for i in range(3) for branch in ("attention", "feed_forward")]
    attention, mlp = branches[::2], branches[1::2]
    return [
        _nn("eps=1e-6", "ε", *branches, "final_norm"),
        _nn("scheme=post", "placement", *branches),
        _nn("scheme=peri", "placement", *branches),
        _nn("qk_norm=head", "QK-norm", *attention),
        _nn("softcap=20", "logit cap", *attention),
        _nn("rope_base=500000.0", "rotary base", *attention, base=",heads=4,positions=rotary"),
        _nn("activation=relu", "activation", *mlp),
        _nn("final_norm=false", "final norm", "final_norm", "head"),
        _nn("attention_scale=0.25", "attention scale", *attention),
        _nn("tie=true", "tied head", "head", "embedding"),
        _nn("bias=false", "bias", *branches),
        _nn("heads=8", "number of heads", *attention, base=""),
    ]


def _sites(a: str, b: str, layers: int) -> list[tuple[Places, Places]]:
    """Places of the port and below the layers of `nn.TransformerEncoder`."""
    return [((a.format(i),), (f"stack.layers.{i}{b}",)) for i in range(layers)]


GPT = Config(width=48, depth=2, heads=6, kv_heads=6, hidden=96)
LLAMA_LIKE = replace(
    GPT, kv_heads=2, norm="rms", eps=1e-6, positions="halves", bias=False, bias_out=False, act="silu",
    gated=True, tied=False, fused=False,
)  # fmt: skip


def _own() -> list[Case]:
    attention = [((f"attn_layers.{2 * i}",),) * 2 for i in range(2)]
    mlp = [((f"attn_layers.{2 * i + 1}",),) * 2 for i in range(2)]
    both = [each for pair in zip(attention, mlp, strict=True) for each in pair]
    last, port = (("final_norm",), ("final_norm",)), partial(Port, GPT)
    flat = [((f"layers.{i}.{a}",), (f"layer{i}",)) for i in range(2) for a in ("attn", "mlp")]

    def x(what: str, kind: str, *sites: tuple[Places, Places], start: Config = GPT, **changes: Any) -> Case:
        changed = partial(Nested, replace(start, **changes))
        return rewritten(f"x-transformers-like: {what}", partial(Nested, start), changed, kind, *sites)

    def other(name: str, style: Any, kind: str, *sites: tuple[Places, Places], **changes: Any) -> Case:
        return rewritten(name, port, partial(style, replace(GPT, **changes)), kind, *sites)

    return [
        x("rotary layout", "rotary layout", *attention, start=LLAMA_LIKE, positions="interleaved"),
        x("rotary base", "rotary base", *attention, start=LLAMA_LIKE, base=1e5),
        x("gate", "gate and up", *mlp, start=LLAMA_LIKE, gate_first=False),
        x("Post-LN", "placement", *both, norm_in=False),
        x("RMSNorm", "norm kind", *both, last, norm="rms"),
        x("no bias", "bias", *both, bias_out=False),
        x("untied", "tied head", (("token_emb",), ("to_logits",)), tied=False),
        x("no last norm", "final norm", (("final_norm",), ("final_norm", "token_emb")), norm_final=False),
        other(
            "nn.TransformerEncoder: GELU", Library, "activation", *_sites("layers.{}.mlp", "", 2), act="gelu"
        ),
        other(
            "nn.TransformerEncoder: heads",
            Library,
            "number of heads",
            *_sites("layers.{}.attn", ".self_attn", 2),
            heads=4,
        ),
        other("one module a layer: ε", Flat, "ε", *flat, (("last",), ("norm",)), eps=1e-6),
        other("one module a layer: mask", Flat, "causal mask", *flat[::2], mask="none"),
    ]


def cases() -> list[Case]:
    """All of them."""
    tables: dict[str, list[tuple[Plant, ...]]] = {
        "GPT-2": GPT2,
        "LLaMA": LLAMA,
        "Gemma-2": GEMMA2,
        "T5": T5,
        "ViT": VIT,
        "BERT": BERT,
        "OLMo-2": OLMO2,
    }
    planted = [ported(name, SIZE, *plants, seed=SEED) for name, table in tables.items() for plants in table]
    hf = [
        configured("Gemma-2", SIZE, "logit cap", "all attention", SEED, attn_logit_softcapping=None),
        configured("OLMo-2", SIZE, "ε", "all", SEED, rms_norm_eps=1e-5),
        configured("ViT", SIZE, "bias", "all attention", SEED, qkv_bias=False),
        configured("T5", SIZE, "activation", "all mlp, all decoder", SEED, feed_forward_proj="gelu"),
        configured("LLaMA", SIZE, "tied head", "last", SEED, tie_word_embeddings=True),
    ]
    return [*planted, *hf, *_models(), *_own()]
