"""Published decoders by name, each of one size."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from benchmarks.diff.fresh.attention import Opt
from benchmarks.diff.fresh.published import ENDS, LLAMA, Published

NEOX = {"n1": "input_layernorm", "n2": "post_attention_layernorm", "heads": "self_attention.query_key_value"}
NEOX |= {"o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
BLOOM = {"emb": "transformer.word_embeddings", "emb_norm": "transformer.word_embeddings_layernorm"}
BLOOM |= {"final": "transformer.ln_f", "head": "lm_head"}
GPT = {"emb": "transformer.wte", "pos": "transformer.wpe", "final": "transformer.ln_f", "head": "lm_head"}


def _llama(kind: str, opt: Opt, **more: Any) -> Published:
    """A relative of LLaMA."""
    config: dict[str, Any] = {
        "vocab_size": opt.vocab,
        "hidden_size": opt.width,
        "intermediate_size": opt.hidden,
    }
    config |= {
        "num_hidden_layers": opt.depth,
        "num_attention_heads": opt.heads,
        "num_key_value_heads": opt.kv,
    }
    config |= {"max_position_embeddings": opt.length, "tie_word_embeddings": opt.tied}
    fields = {k: more.pop(k) for k in ("prefix", "roles", "ends", "attention", "mlp") if k in more}
    return Published(kind, config | more, opt, **fields)


def rope(base: float, part: float | None = None) -> dict[str, Any]:
    """The configuration of rotary positions."""
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    return made if part is None else made | {"partial_rotary_factor": part}


LN: dict[str, Any] = {"norm": "ln", "norm_bias": True, "eps": 1e-5, "gated": False}
ALL: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
FF = {"up": "mlp.c_fc", "down": "mlp.c_proj"}
OPT_ROLES = {
    **{r: f"self_attn.{r}_proj" for r in "qkv"},
    "o": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
OPT_ROLES |= {"n1": "self_attn_layer_norm", "n2": "final_layer_norm"}
OPT_ENDS = {"emb": "model.decoder.embed_tokens", "pos": "model.decoder.embed_positions"}
OPT_ENDS |= {"final": "model.decoder.final_layer_norm", "head": "lm_head"}


def neox() -> Published:
    opt = Opt(72, 3, 4, 4, 18, 104, 311, turned=6, act="gelu", parallel=True, **ALL, **LN)
    config: dict[str, Any] = {
        "vocab_size": 311,
        "hidden_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config |= {"intermediate_size": 104, "max_position_embeddings": 80, "rope_parameters": rope(1e4, 1 / 3)}
    roles = {k: v.replace("self_attention", "attention") for k, v in NEOX.items()}
    ends = {"emb": "gpt_neox.embed_in", "final": "gpt_neox.final_layer_norm", "head": "lm_head"}
    return Published(
        "gpt_neox", config, opt, "gpt_neox.layers.{}", roles, ends, ("attention", "input_layernorm")
    )


def phi() -> Published:
    opt = Opt(
        60,
        2,
        5,
        5,
        12,
        88,
        203,
        turned=6,
        act="tanh",
        parallel=True,
        shared=True,
        head_bias=True,
        **ALL,
        **LN,
    )
    roles = LLAMA | {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}
    ends = ENDS | {"final": "model.final_layernorm"}
    return _llama(
        "phi", opt, rope_parameters=rope(1e4, 0.5), roles=roles, ends=ends, mlp=("mlp", "input_layernorm"),
        resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip


def falcon() -> Published:
    opt = Opt(64, 3, 4, 1, 16, 160, 120, turned=16, act="gelu", parallel=True, shared=True, tied=True, **LN)
    config: dict[str, Any] = {
        "vocab_size": 120,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config |= {"ffn_hidden_size": 160, "alibi": False, "rope_parameters": rope(1e4)}
    return Published(
        "falcon", config, opt, "transformer.h.{}", NEOX, BLOOM, ("self_attention", "input_layernorm"),
        ("mlp", "input_layernorm"),
    )  # fmt: skip


def stablelm() -> Published:
    opt = Opt(48, 4, 4, 2, 12, 72, 77, norm="ln", norm_bias=True, eps=1e-5, turned=6)
    return _llama("stablelm", opt, rope_parameters=rope(1e4, 0.5))


def qwen2() -> Published:
    opt = Opt(40, 4, 4, 2, 10, 100, 150, turned=10, qkv_bias=True, base=1e6)
    return _llama("qwen2", opt, rope_parameters=rope(1e6))


def qwen3() -> Published:
    opt = Opt(48, 3, 4, 2, 14, 80, 260, turned=14, qk="head", base=1e6)
    return _llama("qwen3", opt, rope_parameters=rope(1e6), head_dim=14)


def mistral() -> Published:
    opt = Opt(36, 4, 6, 3, 6, 90, 64, turned=6, window=12)
    return _llama("mistral", opt, rope_parameters=rope(1e4), sliding_window=12, head_dim=6)


def granite() -> Published:
    opt = Opt(64, 3, 4, 2, 16, 96, 210, turned=16, emb=12.0, branch=0.22, scale=0.015625, logits=1 / 8)
    return _llama(
        "granite", opt, rope_parameters=rope(1e4), embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.015625, logits_scaling=8.0,
    )  # fmt: skip


def cohere() -> Published:
    opt = Opt(
        48, 3, 6, 3, 8, 84, 190, norm="ln", eps=1e-5, turned=8, pairs=True, parallel=True, shared=True,
        logits=0.25, tied=True,
    )  # fmt: skip
    return _llama("cohere", opt, rope_parameters=rope(1e4), logit_scale=0.25, mlp=("mlp", "input_layernorm"))


def starcoder2() -> Published:
    opt = Opt(42, 2, 3, 1, 14, 70, 400, turned=14, act="tanh", tied=True, **ALL, **LN)
    return _llama(
        "starcoder2", opt, rope_parameters=rope(1e4), roles=LLAMA | FF, residual_dropout=0.0,
        embedding_dropout=0.0,
    )  # fmt: skip


def gptj() -> Published:
    opt = Opt(
        40, 2, 5, 5, 8, 60, 99, turned=4, pairs=True, act="tanh", parallel=True, shared=True, mlp_bias=True,
        head_bias=True, **LN,
    )  # fmt: skip
    config: dict[str, Any] = {
        "vocab_size": 99,
        "n_embd": 40,
        "n_layer": 2,
        "n_head": 5,
        "n_inner": 60,
        "rotary_dim": 4,
    }
    config |= {"n_positions": 80, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    roles = {**{r: f"attn.{r}_proj" for r in "qkv"}, "o": "attn.out_proj", "n1": "ln_1"}
    roles |= {"up": "mlp.fc_in", "down": "mlp.fc_out"}
    return Published("gptj", config, opt, "transformer.h.{}", roles, GPT, ("attn", "ln_1"), ("mlp", "ln_1"))


def opt_() -> Published:
    opt = Opt(54, 3, 6, 6, 9, 84, 90, act="relu", table=2, tied=True, **ALL, **LN)
    config: dict[str, Any] = {
        "vocab_size": 90,
        "hidden_size": 54,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
    }
    config |= {"ffn_dim": 84, "max_position_embeddings": 80, "word_embed_proj_dim": 54, "dropout": 0.0}
    mlp = ("fc1", "fc2", "activation_fn", "final_layer_norm", "")
    return Published(
        "opt", config, opt, "model.decoder.layers.{}", OPT_ROLES, OPT_ENDS,
        ("self_attn", "self_attn_layer_norm"), mlp,
    )  # fmt: skip


def bloom() -> Published:
    opt = Opt(60, 2, 6, 6, 10, 240, 130, act="tanh", slopes="closest", emb_norm=True, tied=True, **ALL, **LN)
    config: dict[str, Any] = {"vocab_size": 130, "hidden_size": 60, "n_layer": 2, "n_head": 6}
    config |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return Published(
        "bloom", config, opt, "transformer.h.{}", NEOX, BLOOM, ("self_attention", "input_layernorm")
    )


def mpt() -> Published:
    ln: dict[str, Any] = LN | {"norm_bias": False}
    opt = Opt(48, 3, 6, 6, 8, 192, 170, act="gelu", slopes="next", tied=True, **ln)
    config: dict[str, Any] = {"vocab_size": 170, "d_model": 48, "n_layers": 3, "n_heads": 6}
    roles = {"n1": "norm_1", "n2": "norm_2", "concat": "attn.Wqkv", "o": "attn.out_proj"}
    roles |= {"up": "ffn.up_proj", "down": "ffn.down_proj"}
    ends = {"emb": "transformer.wte", "final": "transformer.norm_f", "head": "lm_head"}
    return Published(
        "mpt", config | {"max_seq_len": 80}, opt, "transformer.blocks.{}", roles, ends, ("attn", "norm_1"),
        ("ffn", "norm_2"),
    )  # fmt: skip


def gpt_neo() -> Published:
    local = {1: {"window": 10}, 3: {"window": 10}}
    opt = Opt(
        44, 4, 4, 4, 11, 66, 140, act="tanh", table=0, scale=1.0, o_bias=True, mlp_bias=True, tied=True,
        layers=local, **LN,
    )  # fmt: skip
    config: dict[str, Any] = {
        "vocab_size": 140,
        "hidden_size": 44,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 66,
    }
    config |= {"attention_types": [[["global", "local"], 2]], "window_size": 10}
    config |= {"max_position_embeddings": 82, "resid_dropout": 0.0, "embed_dropout": 0.0}
    roles = {**{r: f"attn.attention.{r}_proj" for r in "qkv"}, "o": "attn.attention.out_proj"}
    roles |= {"n1": "ln_1", "n2": "ln_2", **FF}
    return Published(
        "gpt_neo", config, opt, "transformer.h.{}", roles, GPT, ("attn", "ln_1"), ("mlp", "ln_2")
    )


def smollm3() -> Published:
    opt = Opt(32, 4, 4, 2, 8, 56, 111, turned=8, base=5e4, tied=True, layers={3: {"turned": 0}})
    return _llama(
        "smollm3", opt, rope_parameters=rope(5e4), no_rope_layers=[1, 1, 1, 0], use_sliding_window=False
    )


def gemma() -> Published:
    opt = Opt(36, 2, 3, 1, 10, 110, 88, turned=10, act="tanh", plus=1.0, emb=6.0, tied=True)
    return _llama("gemma", opt, rope_parameters=rope(1e4), head_dim=10)


def nemotron() -> Published:
    opt = Opt(48, 3, 4, 2, 12, 76, 230, norm="ln", norm_bias=True, eps=1e-5, plus=1.0, turned=6)
    opt = replace(opt, gated=False, act="relu2")
    return _llama("nemotron", opt, rope_parameters=rope(1e4, 0.5), head_dim=12)


def glm() -> Published:
    opt = Opt(40, 2, 4, 2, 12, 68, 160, turned=6, pairs=True, qkv_bias=True)
    roles = {k: v for k, v in LLAMA.items() if k not in ("gate", "up")} | {"gate_up": "mlp.gate_up_proj"}
    return _llama(
        "glm", opt, rope_parameters=rope(1e4, 0.5), head_dim=12, roles=roles, attention_bias=True,
        rms_norm_eps=1e-6,
    )  # fmt: skip


def phi3() -> Published:
    opt = Opt(48, 2, 6, 3, 8, 66, 180, turned=8, eps=1e-5)
    keep = {k: v for k, v in LLAMA.items() if k not in ("gate", "up", "q", "k", "v")}
    roles = keep | {"gate_up": "mlp.gate_up_proj", "concat": "self_attn.qkv_proj"}
    return _llama(
        "phi3", opt, rope_parameters=rope(1e4), roles=roles, resid_pdrop=0.0, embd_pdrop=0.0,
        original_max_position_embeddings=80,
    )  # fmt: skip


MAKERS: dict[str, Callable[[], Published]] = {
    "GPT-NeoX": neox, "Phi": phi, "Falcon": falcon, "StableLM": stablelm, "Qwen2": qwen2, "Qwen3": qwen3,
    "Mistral": mistral, "Granite": granite, "Cohere": cohere, "StarCoder2": starcoder2, "GPT-J": gptj,
    "OPT": opt_, "BLOOM": bloom, "MPT": mpt, "GPT-Neo": gpt_neo, "SmolLM3": smollm3, "Gemma": gemma,
    "Nemotron": nemotron, "GLM": glm, "Phi-3": phi3,
}  # fmt: skip
"""Published decoders by name."""
_MADE: dict[str, Published] = {}


def published(name: str) -> Published:
    """A published decoder."""
    if name not in _MADE:
        _MADE[name] = MAKERS[name]()
    return _MADE[name]


def builder(name: str, seed: int, **changes: Any) -> Callable[[], nn.Module]:
    """A function that builds a published decoder with its weights."""
    return partial(published(name).given, seed, **changes)
