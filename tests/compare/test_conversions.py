"""Conversions that went wrong, after public reports: one option of a published model that B does not have.

Both sides are models of transformers with the same weights, which are given. The function part must name what
the option does and nothing else.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import normscope
from normscope.compare.types import Diff, Part

NONE = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
ENCODER: dict[str, Any] = {
    **NONE,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**ENCODER, "num_key_value_heads": 2}
LLAMA = {**GROUPED, "head_dim": 8}
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 64,
    **NONE,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OPT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
    **NONE,
}
BERT = {**ENCODER, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


def rope(kind: str = "default", theta: float = 1e4, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
Options = dict[str, Any]
CASES: dict[str, tuple[str, Options, Options, Options, list[str]]] = {
    "rope_theta": ("llama", LLAMA, rope(theta=5e5), {}, ["rotary-base"]),
    "linear scaling": ("llama", LLAMA, rope("linear", factor=4.0), {}, ["rotary-scaling"]),
    "llama3 scaling": (
        "llama",
        LLAMA,
        rope("llama3", original_max_position_embeddings=32, **LLAMA3),
        {},
        ["rotary-scaling"],
    ),
    "YaRN": (
        "llama",
        LLAMA,
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
        {},
        ["rotary-scaling", "attention-scale"],
    ),
    "partial rotary": (
        "phi",
        GROUPED,
        rope(partial_rotary_factor=0.5),
        rope(partial_rotary_factor=1.0),
        ["rotary-width"],
    ),
    "one rotary pair": (
        "gpt_neox",
        ENCODER,
        rope(partial_rotary_factor=0.25),
        rope(partial_rotary_factor=1.0),
        ["rotary-width"],
    ),
    "activation of parallel branches": ("phi", GROUPED, {"hidden_act": "relu"}, {}, ["activation"]),
    "parallel residual": ("gpt_neox", ENCODER, {}, {"use_parallel_residual": False}, ["parallel"]),
    "parallel with one norm": ("stablelm", GROUPED, {"use_parallel_residual": True}, {}, ["parallel"]),
    "sliding window": ("mistral", LLAMA, {"sliding_window": 8}, {"sliding_window": None}, ["window"]),
    "activation of OPT": ("opt", OPT, {}, {"activation_function": "gelu"}, ["activation"]),
    "norm before": ("opt", OPT, {}, {"do_layer_norm_before": False}, ["placement", "final-norm"]),
    "clipped queries": ("olmo", GROUPED, {"clip_qkv": 0.3}, {}, ["qkv-clip", "qkv-clip"]),
    "activation of BERT": ("bert", BERT, {}, {"hidden_act": "relu"}, ["activation", "head-activation"]),
    "ε of BERT": (
        "bert",
        BERT,
        {},
        {"layer_norm_eps": 1e-3},
        ["embedding-norm-eps", "norm-eps", "head-norm-eps"],
    ),
    "residual multiplier": ("granite", GROUPED, {"residual_multiplier": 0.22}, {}, ["branch-scale"]),
    "routed weights": ("qwen3_moe", EXPERTS, {"norm_topk_prob": True}, {}, ["expert-weights"]),
}
AUTO = {"bert": AutoModelForMaskedLM, "roberta": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}


def published(kind: str, options: Options) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, **options)
    config._attn_implementation = "eager"
    model: torch.nn.Module = AUTO.get(kind, AutoModelForCausalLM).from_config(config)
    return model.eval()


def converted(kind: str, base: Options, right: Options, wrong: Options) -> Diff:
    """A model against the same weights without the option; no weight hides a difference."""
    torch.manual_seed(0)
    a = published(kind, {**base, **right})
    with torch.no_grad():
        for parameter in a.parameters():
            parameter += torch.randn(parameter.shape) * (0.2 if parameter.dim() == 1 else 0.06)
    b = published(kind, {**base, **wrong})
    known = b.state_dict()
    state = {name: value for name, value in a.state_dict().items() if name in known}
    b.load_state_dict(state, strict=False)
    return normscope.diff(a, b, parts="function", batch_size=2, seq_len=32)


@pytest.mark.parametrize("name", CASES)
def test_an_option_that_a_conversion_lost_is_named(name: str) -> None:
    *case, wanted = CASES[name]
    found = converted(*case).of(Part.FUNCTION)
    assert [each.name for each in found] == wanted
    assert all(each.confirmed for each in found if not each.name.startswith("head-"))
