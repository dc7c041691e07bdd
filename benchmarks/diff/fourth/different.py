"""The set `fourth`: mistakes in code that is written in many ways.

Most of them were reported in public: the address stands beside each.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.diff.fourth import recipes
from benchmarks.diff.fourth.base import Mistake, Pair, State, swapped, to_halves, to_pairs
from benchmarks.diff.fourth.families import FAMILIES
from benchmarks.diff.fourth.reported import REPORTED, Row
from benchmarks.diff.plants import Case

HUB = "https://github.com/"
BRANCHES = "layer 0, layer 1"


def turned_back(state: State) -> None:
    """Undo the permutation of queries and keys."""
    swapped(r"attention\.w[qk]\.weight", lambda w: to_halves(w, w.shape[0] // 12))(state)


def turned_twice(state: State) -> None:
    """Permute queries and keys once too often."""
    swapped(r"[qk]_proj\.weight", lambda w: to_pairs(w, w.shape[0] // 12))(state)


def without_head(state: State) -> None:
    """Leave the head as it is drawn."""
    del state["lm_head.weight"]


def widened(state: State) -> None:
    """Repeat the gains of one head for all heads."""
    swapped(r"norm_q\.weight", lambda w: w.repeat(4))(state)
    swapped(r"norm_k\.weight", lambda w: w.repeat(2))(state)


def as_pre_norm(state: State) -> None:
    """Name the norms after the branches as norms before them."""
    for key in [key for key in state if "post_" in key]:
        name = key.replace("post_attention_norm", "norm_1").replace("post_mlp_norm", "norm_2")
        state[name] = state.pop(key)


def rolled(w: Tensor) -> Tensor:
    """Values, queries, keys in place of queries, keys, values."""
    return torch.roll(w, w.shape[0] // 3, 0)


def other_layer(state: State) -> None:
    """Give layer 1 the feed-forward of layer 0."""
    for key in [key for key in state if key.startswith("blks.1.ffn")]:
        state[key] = state[key.replace("blks.1", "blks.0")].clone()


def columns_first(w: Tensor) -> Tensor:
    """Patches read with their columns first."""
    return w.unflatten(1, (4, 4, 3)).transpose(1, 2).flatten(1)


def options(name: str, styles: str, *rows: Row, note: str = "") -> Pair:
    """A pair with mistakes in the code."""
    a, b = split(name, styles)
    made = (Mistake(kind, where, wrong, source=HUB + at if at else "") for kind, where, wrong, at in rows)
    return Pair(name, FAMILIES[name], a, b, tuple(made), note=note)


def split(name: str, styles: str) -> tuple[str, str]:
    """Two names of styles, which may have spaces."""
    known = FAMILIES[name].styles
    return next((a, b) for a in known for b in known if f"{a} {b}" == styles)


def state_of(
    name: str, styles: str, kind: str, where: str, at: str, *, is_alone: bool = False, **changes: Any
) -> Pair:
    """A pair with a mistake in the conversion."""
    a, b = split(name, styles)
    mistake = Mistake(kind, where, source=HUB + at if at else "", **changes)
    return Pair(name, FAMILIES[name], a, b, (mistake,), is_alone=is_alone)


def conversions() -> Iterator[Pair]:
    """Mistakes in the conversion of weights."""
    made = state_of
    at = "EleutherAI/gpt-neox/issues/834"
    yield made("LLaMA", "transformers Meta", "rotary layout", "all attention", at, loaded=turned_back)
    at = "mattn/tensai/pull/57"
    kind = "rotary layout of the checkpoint"
    yield made("LLaMA", "transformers gpt-fast", kind, "all attention", at, given=turned_twice)
    at = "ml-explore/mlx-lm/pull/1623"
    plus = swapped(r"norm_[12]|post_.*norm|ln_f", lambda w: w + 1)
    yield made("Gemma-2", "transformers lit-gpt", "gain of the checkpoint", "all", at, loaded=plus)
    at = "nntile/nntile/pull/402"
    flat = swapped(r"attn\.c_proj\.weight", lambda w: w.t())
    yield made("GPT-2", "transformers nanoGPT", "transposed weights", "all attention", at, loaded=flat)
    at, free = "NVIDIA/TensorRT-LLM/issues/3324", {"is_tied": False}
    yield made("GPT-2", "Megatron nanoGPT", "tied head", "head", at, options=free, loaded=without_head)
    at, full = "EleutherAI/gpt-neox/pull/1367", {"norm_qk": "full"}
    yield made("Qwen3", "tutorial lit-gpt", "QK-norm", "all attention", at, options=full, loaded=widened)
    pre = {"norm_in": True, "norm_out": False}
    yield made("OLMo-2", "transformers lit-gpt", "placement", BRANCHES, "", options=pre, loaded=as_pre_norm)
    at, thirds = "tenstorrent/tt-metal/issues/6243", {"mqa_order": "thirds"}
    yield made("Pythia", "transformers lit-gpt", "order of q, k, v", "all attention", at, options=thirds)
    wrong = swapped("in_proj", rolled)
    yield made("CLIP", "transformers open_clip", "order of q, k, v", "all attention", "", loaded=wrong)
    doubled = swapped(r"blocks\.1\.mlp\.fc2\.weight", lambda w: 2 * w)
    yield made("DINOv2", "transformers timm", "scaled weights", "mlp 1", "", loaded=doubled)
    columns = swapped(r"to_patch\.weight", columns_first)
    yield made("ViT", "transformers vit-pytorch", "weights", "embed", "", loaded=columns)
    yield made("BERT", "transformers textbook", "weights", "mlp 1", "", loaded=other_layer)


def twos() -> Iterator[Pair]:
    """Two mistakes at once, in the order of the forward pass."""

    def both(name: str, styles: str, *rows: tuple[str, str, dict[str, Any]]) -> Pair:
        return options(name, styles, *((kind, where, wrong, "") for kind, where, wrong in rows))

    act = ("activation", "all mlp")
    yield both(
        "GPT-2", "transformers nanoGPT", ("positions", "embed", {"start": 1}), (*act, {"approximate": "none"})
    )
    base = ("rotary base", "all attention", {"theta": 1000.0})
    yield both("LLaMA", "transformers Meta", base, ("final norm", "last", {"final": False}))
    scale = ("attention scale", "all attention")
    yield both("LLaMA", "lit-gpt tutorial", (*scale, {"scale_by": 48}), ("ε", "last", {"last_eps": 1e-4}))
    table = ("embedding scale", "embed", {"scale_embeddings": 1.0})
    capped = ("output cap", "head", {"final_logit_softcapping": None})
    yield both("Gemma-2", "transformers lit-gpt", table, capped)
    free = (*scale, {"attention_scores_scalar": None})
    yield both("Granite", "transformers lit-gpt", free, ("head scale", "head", {"logit_scale": 8.0}))
    width = ("rotary width", "all attention", {"rotary_percentage": 1.0})
    yield both("Pythia", "transformers lit-gpt", width, (*act, {"gelu_approximate": "tanh"}))
    kinds = ("embedding part", "embed", {"types": False})
    yield both("BERT", "transformers textbook", kinds, ("activation", "head", {"head_act": "relu"}))
    bias = ("bias", "all attention", {"qkv_bias": False})
    yield both("Phi", "transformers Sequential", bias, ("output cap", "head", {"cap": 5.0}))
    wide = ("window", "all attention", {"window": 0})
    yield both("Mistral", "Meta gpt-fast", ("ε", "all", {"eps": 1e-4}), wide)
    every = "all attention, all decoder, all cross"
    sharp = ("attention scale", every, {"scale": 8**-0.5})
    yield both("T5", "transformers port", sharp, ("head scale", "head", {"head_scale": False}))


def fresh(name: str, style: str, kind: str, where: str, wrong: dict[str, Any], at: str = "") -> Pair:
    """A pair of fresh models of one style, whose weights are drawn by two laws."""
    mistake = Mistake(kind, where, wrong, source=HUB + at if at else "")
    return Pair(name, FAMILIES[name], style, style, (mistake,), is_fresh=True)


def starts() -> Iterator[Pair]:
    """Mistakes in the law of fresh weights."""
    at = "huggingface/transformers/issues/47458"
    yield fresh("GPT-2", "nanoGPT", "init depth", "all attention, all mlp", {"is_scaled": False}, at)
    at = "huggingface/transformers/pull/26441"
    yield fresh("LLaMA", "course", "init scale", "embed", {"start": "small table"}, at)
    at = "huggingface/transformers/pull/19341"
    yield fresh("LLaMA", "course", "init law", "all attention, all mlp", {"start": "uniform"}, at)
    yield fresh("ViT", "timm", "init zeros", "embed", {"start": "zeros"})
    yield fresh("LLaMA", "tutorial with 1 + γ", "init mean", "all", {"ones": True})


def pairs() -> Iterator[Pair]:
    """All pairs with mistakes, without the recipes."""
    for (name, styles), rows in REPORTED.items():
        for row in rows:
            yield options(name, styles, row, note=", ".join(f"{k}: {v}" for k, v in row[2].items()))
    yield from conversions()
    yield from twos()
    yield from starts()


def cases() -> list[Case]:
    """The pairs of models and of recipes, for `diff.runs`."""
    return [*(pair.case() for pair in pairs()), *recipes.planted()]
