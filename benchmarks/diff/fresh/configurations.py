"""Published models against themselves with one changed option and the same weights."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from benchmarks.diff.families import Places
from benchmarks.diff.fresh.mistakes import M
from benchmarks.diff.fresh.planting import SEED, Mistake, truth
from benchmarks.diff.fresh.published import NONE, loaded, weights_of
from benchmarks.diff.fresh.types import rope
from benchmarks.diff.plants import Case


def _hf(kind: str, masked: bool, base: Mapping[str, Any], **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(kind, **{**({} if masked else NONE), **base, **changes})
    make = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model: nn.Module = make.from_config(config)
    return model


def configured(kind: str, base: Mapping[str, Any], mistake: Mistake, places: Callable[[str], Places]) -> Case:
    """A published model against itself with a changed configuration and the same weights."""
    masked = "position_biased_input" in base or "embedding_size" in base
    make = partial(_hf, kind, masked, base)

    def given(**changes: Any) -> nn.Module:
        return loaded(make(**changes), weights_of(make, SEED))

    depth = next(base[k] for k in ("num_hidden_layers", "num_layers", "n_layer") if k in base)
    found = truth(mistake, depth, lambda w: (places(w), places(w)))
    label = f"{kind}, configuration: {mistake.kind} at {mistake.where}"
    return Case(label, kind, given, partial(given, **mistake.options), (found,))


def _paths(**paths: tuple[str, ...]) -> Callable[[str], Places]:
    def places(where: str) -> Places:
        branch, _, layer = where.partition(" ")
        return tuple(each.replace("*", layer) for each in paths[branch])

    return places


_LAYER = "model.layers.*"
_LIKE_LLAMA = _paths(
    attention=(f"{_LAYER}.self_attn", f"{_LAYER}.input_layernorm", f"{_LAYER}.post_attention_layernorm"),
    mlp=(f"{_LAYER}.mlp", f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.pre_feedforward_layernorm",
         f"{_LAYER}.post_feedforward_layernorm"),
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head"),
)  # fmt: skip
_LIKE_BERT = "{}.encoder.layer.*"
_SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 72, "vocab_size": 131, "max_position_embeddings": 96}
_KV = _SIZES | {"num_key_value_heads": 2}
_NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _encoder(name: str, embeddings: tuple[str, ...], head: tuple[str, ...]) -> Callable[[str], Places]:
    layer = _LIKE_BERT.format(name)
    return _paths(
        attention=(f"{layer}.attention",),
        mlp=(f"{layer}.intermediate", f"{layer}.output"),
        first=embeddings,
        last=head,
    )


def configurations() -> Iterator[Case]:
    """Changed configurations of types that have no port here."""
    gemma3: dict[str, Any] = _KV | {"head_dim": 10, "sliding_window": 14, "query_pre_attn_scalar": 24}
    gemma3 |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    gemma3 |= {"rope_parameters": {f"{each}_attention": rope(1e4) for each in ("sliding", "full")}}
    full = {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
    yield configured(
        "gemma3_text",
        gemma3,
        M(
            "attention scale",
            "all attention",
            {"query_pre_attn_scalar": 10},
            None,
            "ggml-org/llama.cpp/pull/8444",
        ),
        _LIKE_LLAMA,
    )
    yield configured("gemma3_text", gemma3, M("window", "attention 0", full), _LIKE_LLAMA)
    yield configured(
        "starcoder2",
        _KV | {"embedding_dropout": 0.0, "residual_dropout": 0.0},
        M("window", "all attention", {"sliding_window": 16}),
        _LIKE_LLAMA,
    )
    yield configured(
        "olmo2", _KV, M("rotary base", "all attention", {"rope_parameters": rope(5e5)}), _LIKE_LLAMA
    )
    yield configured("arcee", _KV, M("activation", "all mlp", {"hidden_act": "relu"}), _LIKE_LLAMA)
    yield configured("helium", _KV | {"head_dim": 12}, M("ε", "all", {"rms_norm_eps": 1e-5}), _LIKE_LLAMA)
    yield configured(
        "electra",
        _SIZES | _NONE | {"embedding_size": 32},
        M("number of heads", "all attention", {"num_attention_heads": 6}),
        _encoder("electra", ("electra.embeddings", "electra.embeddings_project"), ("generator_predictions",)),
    )
    deberta = _SIZES | _NONE | {"position_biased_input": True, "type_vocab_size": 0, "pos_att_type": []}
    yield configured(
        "deberta-v2",
        deberta,
        M("ε", "everywhere", {"layer_norm_eps": 1e-5}),
        _encoder("deberta", ("deberta.embeddings",), ("cls", "lm_predictions")),
    )
    layer = "model.layers.*"
    xglm: dict[str, Any] = {
        "vocab_size": 131,
        "d_model": 48,
        "num_layers": 3,
        "attention_heads": 4,
        "ffn_dim": 72,
    }
    xglm |= {"max_position_embeddings": 96, "dropout": 0.0, "attention_dropout": 0.0}
    yield configured(
        "xglm",
        xglm,
        M("embedding scale", "first", {"scale_embedding": False}, None, "huggingface/optimum-nvidia/pull/85"),
        _paths(
            attention=(f"{layer}.self_attn", f"{layer}.self_attn_layer_norm"),
            mlp=(f"{layer}.fc1", f"{layer}.fc2", f"{layer}.final_layer_norm", layer),
            first=("model.embed_tokens", "model.embed_positions"),
            last=("model.layer_norm", "lm_head"),
        ),
    )
