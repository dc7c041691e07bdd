"""The families of the sets `third` and `same-third`: types of transformers and own models, with styles."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, BertForMaskedLM
from transformers import T5EncoderModel as T5

from benchmarks.diff.families import Places
from benchmarks.diff.third import (
    encoders,
    gates,
    gemma,
    gpt,
    gpt_annotated,
    gpt_functions,
    gpt_ports,
    llama,
    llama_more,
    translators,
    variants,
    vit,
)
from benchmarks.diff.third.base import Family, Style, ids
from benchmarks.diff.third.wrapped import OwnGPT2, OwnLlama
from benchmarks.diff.third.wrapped import variants as further

OWN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def published(
    kind: str, options: Mapping[str, Any], maker: Any = AutoModelForCausalLM
) -> Callable[..., nn.Module]:
    """Fresh models of a type of transformers."""

    def made(**changes: Any) -> nn.Module:
        config = AutoConfig.for_model(kind, **{**OWN, **options, **changes})
        return maker.from_config(config) if hasattr(maker, "from_config") else maker(config)

    return made


def _own(places: str, attention: str, mlp: str, first: str, last: str) -> tuple[Places, ...]:
    return (
        (places,),
        *(tuple(f"{places}.{x}" for x in each.split()) for each in (attention, mlp)),
        tuple(first.split()),
        tuple(last.split()),
    )


def _sizes(module: Any, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": module.W,
        "num_hidden_layers": module.L,
        "num_attention_heads": module.H,
        "intermediate_size": getattr(module, "HIDDEN", 4 * module.W),
        "vocab_size": module.V,
        "max_position_embeddings": module.T,
        **more,
    }


_GPT = {
    "n_embd": gpt.W,
    "n_layer": gpt.L,
    "n_head": gpt.H,
    "vocab_size": gpt.V,
    "n_positions": gpt.T,
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
}
_GPT_PLACES = _own(
    "transformer.h.{}",
    "attn ln_1",
    "mlp ln_2",
    "transformer.wte transformer.wpe transformer",
    "transformer.ln_f lm_head",
)
_LLAMA_PLACES = _own(
    "model.layers.{}",
    "self_attn input_layernorm",
    "mlp post_attention_layernorm",
    "model.embed_tokens model",
    "model.norm lm_head",
)
_LLAMA = _sizes(llama, num_key_value_heads=llama.KV, rms_norm_eps=llama.EPS)
_MINE = further(gpt.STYLES["nanoGPT"], llama.STYLES["lit-gpt"], gpt_functions.STYLES["fairseq"])
GPT = Family(
    "GPT-2",
    gpt.L,
    Style(published("gpt2", _GPT), dict, *_GPT_PLACES),
    partial(ids, gpt.V),
    {
        **gpt.STYLES,
        **gpt_annotated.STYLES,
        **gpt_functions.STYLES,
        **gpt_ports.STYLES,
        **{name: style for name, style in _MINE.items() if "lit-gpt" not in name},
        "minGPT with a closure": Style(
            lambda slip="": gpt.MinGPT(slip, closure=True), gpt.to_min, *_GPT_PLACES
        ),
        "a subclass": Style(published("gpt2", _GPT, OwnGPT2), dict, *_GPT_PLACES),
    },
)
LLAMA = Family(
    "LLaMA",
    llama.L,
    Style(published("llama", _LLAMA), dict, *_LLAMA_PLACES),
    partial(ids, llama.V),
    {
        **llama.STYLES,
        **llama_more.STYLES,
        **{name: style for name, style in _MINE.items() if "lit-gpt" in name},
        "a subclass": Style(published("llama", _LLAMA, OwnLlama), dict, *_LLAMA_PLACES),
    },
)
QWEN = Family(
    "Qwen3",
    variants.L,
    Style(
        published(
            "qwen3",
            _sizes(
                variants,
                num_key_value_heads=variants.KV,
                head_dim=variants.D,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            ),
        ),
        dict,
        *_LLAMA_PLACES,
    ),
    partial(ids, variants.V),
    {"from scratch": variants.SCRATCH},
)
OLMO = Family(
    "OLMo 2",
    variants.L,
    Style(
        published(
            "olmo2",
            _sizes(
                variants,
                num_key_value_heads=variants.KV,
                rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            ),
        ),
        dict,
        *_own(
            "model.layers.{}",
            "self_attn post_attention_layernorm",
            "mlp post_feedforward_layernorm",
            "model.embed_tokens model",
            "model.norm lm_head",
        ),
    ),
    partial(ids, variants.V),
    {"OLMo": variants.OLMO},
)
CHAT = Family(
    "NanoChat",
    variants.L,
    Style(
        published("nanochat", _sizes(variants, num_key_value_heads=variants.KV, final_logit_softcapping=2.0)),
        dict,
        *_LLAMA_PLACES,
    ),
    partial(ids, variants.V),
    {"nanochat": variants.CHAT},
)
GEMMA = Family(
    "Gemma 2",
    gemma.L,
    Style(
        published(
            "gemma2",
            _sizes(
                gemma,
                num_key_value_heads=gemma.KV,
                head_dim=gemma.D,
                query_pre_attn_scalar=gemma.D,
                sliding_window=gemma.WINDOW,
                attn_logit_softcapping=gemma.CAP,
                final_logit_softcapping=gemma.OUTPUT_CAP,
                attn_implementation="eager",
            ),
        ),
        dict,
        *_own(
            "model.layers.{}",
            "self_attn input_layernorm post_attention_layernorm",
            "mlp pre_feedforward_layernorm post_feedforward_layernorm",
            "model.embed_tokens model",
            "model.norm lm_head",
        ),
    ),
    partial(ids, gemma.V),
    gemma.GEMMA,
)
NEOX = Family(
    "GPT-NeoX",
    gemma.L,
    Style(
        published(
            "gpt_neox",
            _sizes(
                gemma,
                intermediate_size=4 * gemma.W,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
            ),
        ),
        dict,
        *_own(
            "gpt_neox.layers.{}",
            "attention input_layernorm",
            "mlp post_attention_layernorm",
            "gpt_neox.embed_in gpt_neox",
            "gpt_neox.final_layer_norm lm_head",
        ),
    ),
    partial(ids, gemma.V),
    {"one Sequential": gemma.NEOX},
)
BERT = Family(
    "BERT",
    encoders.L,
    Style(
        published(
            "bert",
            _sizes(encoders, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            BertForMaskedLM,
        ),
        dict,
        *_own(
            "bert.encoder.layer.{}",
            "attention",
            "intermediate output",
            "bert.embeddings bert",
            "cls",
        ),
    ),
    partial(ids, encoders.V),
    encoders.BERT,
)


def pictures() -> Tensor:
    """A batch of pictures."""
    return torch.randn(3, 3, vit.IMAGE, vit.IMAGE, generator=torch.Generator().manual_seed(4))


VIT = Family(
    "ViT",
    vit.L,
    Style(
        published(
            "vit",
            {
                "hidden_size": vit.W,
                "num_hidden_layers": vit.L,
                "num_attention_heads": vit.H,
                "intermediate_size": vit.HIDDEN,
                "image_size": vit.IMAGE,
                "patch_size": vit.PATCH,
                "num_labels": vit.CLASSES,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            AutoModelForImageClassification,
        ),
        dict,
        *_own(
            "vit.layers.{}",
            "attention layernorm_before",
            "mlp layernorm_after",
            "vit.embeddings vit",
            "vit.layernorm classifier",
        ),
    ),
    pictures,
    vit.VIT,
)
T5_ENCODER = Family(
    "T5's encoder",
    translators.L,
    Style(
        published(
            "t5",
            {
                "d_model": translators.W,
                "num_layers": translators.L,
                "d_kv": translators.D,
                "num_heads": translators.H,
                "d_ff": translators.HIDDEN,
                "vocab_size": translators.V,
                "relative_attention_num_buckets": translators.BUCKETS,
                "relative_attention_max_distance": translators.FARTHEST,
                "dropout_rate": 0.0,
            },
            T5,
        ),
        dict,
        *_own(
            "encoder.block.{}",
            "layer.0",
            "layer.1",
            "shared encoder.embed_tokens encoder",
            "encoder.final_layer_norm encoder",
        ),
    ),
    partial(ids, translators.V),
    {"Mesh TensorFlow": translators.MESH},
)


def two_texts() -> tuple[Tensor, Tensor]:
    """A source and a target."""
    return ids(translators.V), ids(translators.V, length=17)


TRANSLATOR = Family("translator", translators.L, translators.TORCH, two_texts, translators.TRANSLATORS)
MIXTURE = Family(
    "Mixtral",
    gates.L,
    Style(
        published(
            "mixtral",
            {
                **_LLAMA,
                "num_hidden_layers": gates.L,
                "intermediate_size": gates.HIDDEN,
                "num_local_experts": gates.EXPERTS,
                "num_experts_per_tok": gates.TOP,
                "experts_implementation": "eager",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        ),
        dict,
        *_LLAMA_PLACES,
    ),
    partial(ids, llama.V),
    gates.MIXTURES,
)
CONVOLUTION = Family(
    "gated convolution", gates.L + 1, gates.CONVOLUTION, partial(ids, llama.V), {"shifts": gates.SHIFTS}
)
FAMILIES = (
    GPT, LLAMA, QWEN, OLMO, CHAT, GEMMA, NEOX, BERT, VIT, T5_ENCODER, TRANSLATOR, MIXTURE, CONVOLUTION,
)  # fmt: skip
