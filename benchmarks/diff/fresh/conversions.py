"""Published encoders, image classifiers and translators, and their weights for `diff.fresh.ports`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    MarianConfig,
    MarianMTModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    RobertaConfig,
    RobertaForMaskedLM,
)

from benchmarks.diff.fresh.ports import Form, State
from benchmarks.diff.fresh.types import rope


def both(state: State, pairs: Mapping[str, str]) -> State:
    return {
        f"{new}.{leaf}": state[f"{old}.{leaf}"]
        for old, new in pairs.items()
        for leaf in ("weight", "bias")
        if f"{old}.{leaf}" in state
    }


def cat(state: State, paths: list[str], leaf: str) -> Tensor:
    return torch.cat([state[f"{path}.{leaf}"] for path in paths])


def roberta(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 90}
    rest = {"vocab_size": 120, "max_position_embeddings": 84, "type_vocab_size": 1, "pad_token_id": 1}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5}
    return RobertaForMaskedLM(RobertaConfig(**{**sizes, **rest, **none, **changes}))


def from_roberta(state: State, form: Form) -> State:
    made = {"types.weight": state["roberta.embeddings.token_type_embeddings.weight"]}
    made["decoder.bias"] = state["lm_head.bias"]
    pairs = {
        "roberta.embeddings.word_embeddings": "words",
        "roberta.embeddings.position_embeddings": "places",
    }
    pairs |= {"roberta.embeddings.LayerNorm": "start_norm", "lm_head.dense": "dense"}
    pairs |= {"lm_head.layer_norm": "dense_norm"}
    for i in range(form.depth):
        old, new = f"roberta.encoder.layer.{i}", f"tower.{i}"
        own = [f"{old}.attention.self.{r}" for r in ("query", "key", "value")]
        made |= {f"{new}.mha.in_proj_{leaf}": cat(state, own, leaf) for leaf in ("weight", "bias")}
        pairs |= {f"{old}.attention.output.dense": f"{new}.mha.out_proj"}
        pairs |= {
            f"{old}.attention.output.LayerNorm": f"{new}.mha_norm",
            f"{old}.output.LayerNorm": f"{new}.wide_norm",
        }
        pairs |= {f"{old}.intermediate.dense": f"{new}.wide.up", f"{old}.output.dense": f"{new}.wide.down"}
    return made | both(state, pairs)


def distil(**changes: Any) -> nn.Module:
    sizes = {"dim": 44, "n_layers": 3, "n_heads": 4, "hidden_dim": 70, "vocab_size": 95}
    rest = {"max_position_embeddings": 84, "dropout": 0.0, "attention_dropout": 0.0}
    return DistilBertForMaskedLM(DistilBertConfig(**{**sizes, **rest, **changes}))


def from_distil(state: State, form: Form) -> State:
    made = {"decoder.bias": state["vocab_projector.bias"]}
    head = "distilbert.embeddings"
    pairs = {f"{head}.word_embeddings": "words", f"{head}.position_embeddings": "places"}
    pairs |= {f"{head}.LayerNorm": "start_norm", "vocab_transform": "dense", "vocab_layer_norm": "dense_norm"}
    for i in range(form.depth):
        old, new = f"distilbert.transformer.layer.{i}", f"tower.{i}"
        own = [f"{old}.attention.{r}_lin" for r in "qkv"]
        made |= {f"{new}.mha.in_proj_{leaf}": cat(state, own, leaf) for leaf in ("weight", "bias")}
        pairs |= {
            f"{old}.attention.out_lin": f"{new}.mha.out_proj",
            f"{old}.sa_layer_norm": f"{new}.mha_norm",
        }
        pairs |= {f"{old}.output_layer_norm": f"{new}.wide_norm"}
        pairs |= {f"{old}.ffn.lin1": f"{new}.wide.up", f"{old}.ffn.lin2": f"{new}.wide.down"}
    return made | both(state, pairs)


def modern(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    rest = {"vocab_size": 200, "max_position_embeddings": 84, "pad_token_id": 0, "bos_token_id": 1}
    rest |= {"eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 12}
    thetas = {"full_attention": rope(160000.0), "sliding_attention": rope(10000.0)}
    return ModernBertForMaskedLM(ModernBertConfig(**{**sizes, **rest, "rope_parameters": thetas, **changes}))


def from_modern(state: State, form: Form) -> State:
    made = {"cls_out.bias": state["decoder.bias"]}
    pairs = {"model.embeddings.tok_embeddings": "emb", "model.embeddings.norm": "emb_norm"}
    pairs |= {"model.final_norm": "out_norm", "head.dense": "cls_dense", "head.norm": "cls_norm"}
    for i in range(form.depth):
        old, new = f"model.layers.{i}", f"layers.{i}"
        parts = state[f"{old}.attn.Wqkv.weight"].chunk(3)
        made |= {f"{new}.attention.{r}.weight": p for r, p in zip("qkv", parts, strict=True)}
        gate, up = state[f"{old}.mlp.Wi.weight"].chunk(2)
        made |= {f"{new}.ffn.gate.weight": gate, f"{new}.ffn.up.weight": up}
        pairs |= {f"{old}.attn.Wo": f"{new}.attention.out", f"{old}.mlp.Wo": f"{new}.ffn.down"}
        pairs |= {f"{old}.attn_norm": f"{new}.pre_attn", f"{old}.mlp_norm": f"{new}.pre_ffn"}
    return made | both(state, pairs)


def deit(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 42, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 64}
    rest = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0}
    return DeiTForImageClassification(DeiTConfig(**{**sizes, **rest, **changes}))


def dino(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2}
    return Dinov2ForImageClassification(
        Dinov2Config(**{**sizes, "image_size": 16, "patch_size": 4, **changes})
    )


def from_images(state: State, form: Form) -> State:
    name, layers = ("deit", "deit.layers") if form.dist else ("dinov2", "dinov2.encoder.layer")
    head = f"{name}.embeddings"
    made = {"cls_token": state[f"{head}.cls_token"], "pos_embed": state[f"{head}.position_embeddings"]}
    if form.dist:
        made["dist_token"] = state[f"{head}.distillation_token"]
    made["patch_embed.weight"] = state[f"{head}.patch_embeddings.projection.weight"].flatten(1)
    made["patch_embed.bias"] = state[f"{head}.patch_embeddings.projection.bias"]
    pairs = {f"{name}.layernorm": "norm", "classifier": "head"}
    first, second = ("layernorm_before", "layernorm_after") if form.dist else ("norm1", "norm2")
    for i in range(form.depth):
        old, new = f"{layers}.{i}", f"blocks.{i}"
        own = [f"{old}.attention.{r}_proj" for r in "qkv"]
        made |= {f"{new}.attn.qkv.{leaf}": cat(state, own, leaf) for leaf in ("weight", "bias")}
        pairs |= {f"{old}.attention.o_proj": f"{new}.attn.proj", f"{old}.{first}": f"{new}.norm1"}
        pairs |= {f"{old}.{second}": f"{new}.norm2"}
        pairs |= {f"{old}.mlp.{fc}": f"{new}.mlp.{fc}" for fc in ("fc1", "fc2")}
        if form.soft:
            made |= {f"{new}.ls{n}.gamma": state[f"{old}.layer_scale{n}.lambda1"] for n in (1, 2)}
    return made | both(state, pairs)


def translator(kind: str, **changes: Any) -> nn.Module:
    config, model = {
        "bart": (BartConfig, BartForConditionalGeneration),
        "marian": (MarianConfig, MarianMTModel),
        "pegasus": (PegasusConfig, PegasusForConditionalGeneration),
    }[kind]
    sizes = {"bart": (48, 2, 4, 72, 140), "marian": (40, 2, 5, 60, 110), "pegasus": (36, 3, 4, 54, 75)}[kind]
    width, depth, heads, hidden, vocab = sizes
    made: dict[str, Any] = {
        "d_model": width,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    }
    for side in ("encoder", "decoder"):
        made |= {f"{side}_layers": depth, f"{side}_attention_heads": heads, f"{side}_ffn_dim": hidden}
    made |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    made |= {"forced_eos_token_id": None}
    made |= {"marian": {"scale_embedding": True, "activation_function": "swish"}}.get(kind, {})
    made |= {"pegasus": {"scale_embedding": True, "activation_function": "relu"}}.get(kind, {})
    return model(config(**{**made, **changes}))


def from_translator(state: State, form: Form) -> State:
    made = {"shared.weight": state["model.shared.weight"], "logit_bias": state["final_logits_bias"][0]}
    pairs: dict[str, str] = {}
    for side, short in (("encoder", "enc"), ("decoder", "dec")):
        pairs |= {f"model.{side}.embed_positions": f"{short}_pos"}
        pairs |= {f"model.{side}.layernorm_embedding": f"{short}_start"}
        pairs |= {f"model.{side}.layer_norm": f"{short}_end"}
        for i in range(form.depth):
            old, new = f"model.{side}.layers.{i}", f"{side}.{i}"
            for theirs, ours in (("self_attn", "att"), ("encoder_attn", "cross")):
                if f"{old}.{theirs}.q_proj.weight" not in state:
                    continue
                own = [f"{old}.{theirs}.{r}_proj" for r in "kv"]
                made |= {f"{new}.{ours}.kv.{leaf}": cat(state, own, leaf) for leaf in ("weight", "bias")}
                pairs |= {
                    f"{old}.{theirs}.q_proj": f"{new}.{ours}.q",
                    f"{old}.{theirs}.out_proj": f"{new}.{ours}.o",
                }
                pairs |= {f"{old}.{theirs}_layer_norm": f"{new}.{ours}_norm"}
            pairs |= {f"{old}.fc1": f"{new}.ff.up", f"{old}.fc2": f"{new}.ff.down"}
            pairs |= {f"{old}.final_layer_norm": f"{new}.ff_norm"}
    return made | both(state, pairs)
