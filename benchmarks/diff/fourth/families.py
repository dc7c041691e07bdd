"""Families of the fourth set: published types with their styles and places."""

from functools import partial
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.fourth import (
    course,
    encoders,
    gpt,
    lit,
    llama,
    others,
    parallel,
    translators,
    tutorial,
    vision,
)
from benchmarks.diff.fourth.base import VOCABULARY, Family, State, Style, renamed, same
from benchmarks.diff.fourth.places import (
    ANNOTATED,
    ANY,
    BERT,
    BLOCKS,
    CLIP,
    COURSE,
    DECODER,
    DINO,
    FAIRSEQ,
    GPT2,
    GPTJ,
    LIT,
    LLAMA,
    MEGATRON,
    META,
    NEOX,
    OLMO,
    OPEN,
    PALM,
    PHI,
    PLAIN,
    SANDWICH,
    SHARED,
    T5,
    T5_PORT,
    TEXTBOOK,
    TIMM,
    TORCH,
    TRANSFORMER,
    TUTORIAL,
    VIT,
    places,
)


def bloom(**changes: Any) -> nn.Module:
    """The published BLOOM, with a number of heads that is no power of two."""
    sizes = {"hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("bloom", **sizes, bos_token_id=1, eos_token_id=2, **changes)
    return AutoModelForCausalLM.from_config(config)


BLOOM = {"width": 48, "heads": 6, "alibi": True, "constant": 0.79788456}


def to_bloom(state: State) -> State:
    """Megatron's weights of BLOOM."""
    return renamed(
        state,
        (r"^transformer\.word_embeddings_layernorm", "embedding_norm"),
        (r"^transformer\.h\.", "layers."),
        (r"^transformer\.ln_f", "final_layernorm"),
        (r"^transformer\.", ""),
        drop="lm_head",
    )


def rope(**more: Any) -> dict[str, Any]:
    """Parameters of a rotation."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more}}


qwen2 = partial(llama.published, "qwen2")
mistral = partial(llama.published, "mistral", sliding_window=8, head_dim=12)
qwen3 = partial(llama.published, "qwen3", head_dim=12)
gemma2 = partial(
    llama.published,
    "gemma2",
    head_dim=12,
    query_pre_attn_scalar=20,
    sliding_window=8,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=4.0,
)
olmo2 = partial(llama.published, "olmo2", rms_norm_eps=1e-6)
granite = partial(
    llama.published,
    "granite",
    embedding_multiplier=6.0,
    residual_multiplier=0.22,
    attention_multiplier=0.2,
    logits_scaling=8.0,
)
pythia = partial(
    llama.published,
    "gpt_neox",
    **rope(partial_rotary_factor=0.5),
    attention_bias=True,
    use_parallel_residual=True,
)
GEMMA = (
    {"norm_unit_offset": True, "norm_out": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh"}
    | {"scale_embeddings": 48**0.5, "attention_scores_scalar": 20, "attention_logit_softcapping": 5.0}
    | {"final_logit_softcapping": 4.0, "sliding_window_size": 8, "tied": True}
)
GRANITE = {
    "scale_embeddings": 6.0,
    "residual_scale": 0.22,
    "attention_scores_scalar": 25.0,
    "logit_scale": 0.125,
}
PYTHIA = {"n_query_groups": 4, "rotary_percentage": 0.5, "parallel_residual": True, "bias": True} | {
    "norm_class_name": "LayerNorm",
    "norm_eps": 1e-5,
    "mlp_class_name": "GptNeoxMLP",
}


def with_defaults(make: Any, defaults: dict[str, Any], **options: Any) -> nn.Module:
    """A model of a style with a family's options."""
    return make(**{**defaults, **options})


def of(make: Any, **defaults: Any) -> Any:
    """A style's builder with a family's options."""
    return partial(with_defaults, make, defaults)


def hf(make: Any, where: dict[str, str]) -> Style:
    """The published style."""
    return Style(make, same, where)


LLAMAS = {
    "transformers": hf(partial(llama.published, "llama"), LLAMA),
    "Meta": Style(llama.meta, llama.to_meta, META),
    "gpt-fast": Style(llama.fast, llama.to_fast, META),
    "course": Style(course.course, course.to_course, COURSE),
    "tutorial": Style(tutorial.tutorial, tutorial.to_tutorial, TUTORIAL),
    "tutorial with 1 + γ": Style(of(tutorial.tutorial, plus=1.0), tutorial.to_tutorial_plus, TUTORIAL),
    "lit-gpt": Style(lit.lit, lit.to_lit, LIT),
}


def two(published: Any, where: dict[str, str], name: str, style: Style, **more: Any) -> Family:
    """A published type with one port."""
    return Family(published, {"transformers": hf(published, where), name: style}, **more)


FAMILIES: dict[str, Family] = {
    "GPT-2": Family(
        gpt.gpt2,
        {
            "transformers": hf(gpt.gpt2, GPT2),
            "nanoGPT": Style(gpt.nano, gpt.linear, GPT2),
            "Megatron": Style(gpt.megatron, gpt.to_megatron, MEGATRON),
            "Flax": Style(gpt.Stacked, gpt.to_stacked, ANY),
        },
    ),
    "BLOOM": two(
        bloom,
        {
            **MEGATRON,
            **places(
                "transformer.h.{0}",
                "self_attention input_layernorm",
                "mlp post_attention_layernorm",
                "transformer.word_embeddings",
                "transformer.ln_f",
                "lm_head",
                "transformer.word_embeddings_layernorm",
            ),
        },
        "Megatron",
        Style(of(gpt.megatron, **BLOOM), to_bloom, MEGATRON),
    ),
    "LLaMA": Family(partial(llama.published, "llama"), LLAMAS),
    "Qwen2": two(qwen2, LLAMA, "Meta", Style(of(llama.meta, bias=True), llama.to_meta, META)),
    "Mistral": Family(
        mistral,
        {
            "transformers": hf(mistral, LLAMA),
            "Meta": Style(of(llama.meta, window=8), llama.to_meta, META),
            "gpt-fast": Style(of(llama.fast, window=8), llama.to_fast, META),
        },
    ),
    "Qwen3": Family(
        qwen3,
        {
            "transformers": hf(qwen3, LLAMA),
            "tutorial": Style(of(tutorial.tutorial, qk_norm=True), tutorial.to_tutorial, TUTORIAL),
            "lit-gpt": Style(of(lit.lit, norm_qk="head"), lit.to_lit, LIT),
        },
    ),
    "Gemma-2": two(
        gemma2, SANDWICH, "lit-gpt", Style(of(lit.lit, **GEMMA), partial(lit.to_lit, names=lit.POST), LIT)
    ),
    "OLMo-2": two(
        olmo2,
        OLMO,
        "lit-gpt",
        Style(
            of(lit.lit, norm_in=False, norm_out=True, norm_qk="full"),
            partial(lit.to_lit, names=lit.POST),
            LIT,
        ),
    ),
    "Granite": two(granite, LLAMA, "lit-gpt", Style(of(lit.lit, **GRANITE), lit.to_lit, LIT)),
    "Pythia": two(pythia, NEOX, "lit-gpt", Style(of(lit.lit, **PYTHIA), lit.neox_to_lit, LIT)),
    "Command-R": two(parallel.cohere, SHARED, "PaLM", Style(parallel.palm, parallel.to_palm, PALM)),
    "GPT-J": two(
        parallel.gptj, GPTJ, "functions", Style(parallel.functional, parallel.to_functional, BLOCKS)
    ),
    "OPT": two(
        others.opt,
        {k: v.replace("layers.", "model.decoder.layers.") for k, v in DECODER.items()}
        | {
            "embed": "model.decoder.embed_positions",
            "last": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        "fairseq",
        Style(others.FairseqDecoder, others.to_decoder, DECODER),
    ),
    "gated convolutions": Family(
        others.GatedModel,
        {
            "Mamba's shape": Style(others.GatedModel, same, ANY),
            "Sequential": Style(others.SplitGatedModel, others.to_split_gated, ANY),
        },
    ),
    "Phi": two(
        parallel.phi,
        PHI,
        "Sequential",
        Style(
            parallel.sequential,
            parallel.to_sequential,
            (
                {"block": "layers.{1}", "attention": "layers.{1}.mixer layers.{1}.ln"}
                | {"mlp": "layers.{1}.mlp layers.{1}.ln", "embed": "layers.0", "last": "layers.3.ln"}
                | {"head": "layers.3.linear", "first": "layers.0"}
            ),
        ),
    ),
    "BERT": Family(
        partial(encoders.published, "bert"),
        {
            "transformers": hf(partial(encoders.published, "bert"), BERT),
            "textbook": Style(encoders.textbook, encoders.to_textbook, TEXTBOOK),
            "nn.TransformerEncoder": Style(encoders.of_torch, encoders.to_torch, TORCH),
        },
    ),
    "RoBERTa": two(
        partial(encoders.published, "roberta", type_vocab_size=1, layer_norm_eps=1e-5),
        {k: v.replace("bert.", "roberta.", 1).replace("cls", "lm_head") for k, v in BERT.items()},
        "fairseq",
        Style(encoders.fairseq, encoders.to_fairseq, FAIRSEQ),
    ),
    "ViT": Family(
        vision.vit,
        {
            "transformers": hf(vision.vit, VIT),
            "timm": Style(vision.timm, vision.to_timm, TIMM),
            "vit-pytorch": Style(vision.plain, vision.to_plain, PLAIN),
        },
        vision.images,
    ),
    "DINOv2": two(
        vision.dinov2, DINO, "timm", Style(vision.timm_dinov2, vision.to_timm, TIMM), batch=vision.images
    ),
    "CLIP": two(vision.clip, CLIP, "open_clip", Style(vision.open_clip, vision.to_open_clip, OPEN)),
    "T5": two(
        translators.t5,
        T5,
        "port",
        Style(translators.t5_port, translators.to_t5_port, T5_PORT),
        batch=translators.texts,
    ),
    "translator": Family(
        translators.of_torch,
        {
            "nn.Transformer": Style(translators.of_torch, same, TRANSFORMER),
            "Annotated Transformer": Style(translators.annotated, translators.to_annotated, ANNOTATED),
        },
        translators.pair_of_texts,
    ),
}
"""All families by name."""
