"""Decoder-only language models, with the expected reading from their modelling code."""

from hf_base import (
    ALPHA_BETA,
    BERT,
    DEEPSEEK,
    EXPERTS,
    GPT,
    GPTJ,
    LLAMA,
    MAMBA,
    MIXTURE,
    NEOX,
    VOCABULARY,
    entry,
    same,
)
from readings import placed, post, pre, stack

CAUSAL = [
    *same("gpt2 gpt_bigcode", GPT, pre()),
    # h = ln_2(n + mlp(n)), n = ln_1(x + attn(x)): the first GPT was Post-LN.
    entry("openai-gpt", GPT, post()),
    entry("ctrl", {**GPT, "dff": 48}, pre()),
    entry(
        "gpt_neo",
        {
            **{k: BERT[k] for k in ("hidden_size", "vocab_size", "max_position_embeddings")},
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 48,
            "attention_types": [[["global", "local"], 1]],
        },
        pre(),
    ),
    # mlp + attn + x, one norm each: parallel branches.
    entry("gpt_neox", NEOX, pre(), scheme="parallel"),
    entry("gpt_neox", {**NEOX, "use_parallel_residual": False}, pre(), name="gpt_neox-sequential"),
    # one norm for both branches
    entry("gptj", GPTJ, pre(), scheme="parallel"),
    entry("codegen", GPTJ, pre(), scheme="parallel"),
    entry("phi", NEOX, pre(), scheme="parallel"),
    entry("cohere", {k: v for k, v in LLAMA.items() if k != "head_dim"}, pre(), scheme="parallel"),
    entry("cohere2", LLAMA, pre(), scheme="parallel"),
    # mlp_output += attention_output, then dropout_add: in place.
    entry("falcon", NEOX, pre(), scheme="parallel"),
    entry(
        "falcon",
        {**NEOX, "new_decoder_architecture": True, "num_kv_heads": 2},
        pre(),
        scheme="parallel",
        name="falcon-two-norms",
    ),
    entry("falcon", {**NEOX, "parallel_attn": False}, pre(), name="falcon-sequential"),
    entry("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}, pre()),
    entry(
        "mpt",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "vocab_size": VOCABULARY},
        pre(),
    ),
    entry("opt", {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 32}, pre()),
    entry(
        "opt",
        {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        post(),
        name="opt-post",
    ),
    # project_in and project_out around the stack, as OPT-350m
    entry(
        "opt",
        {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        post(),
        name="opt-projected",
    ),
    entry(
        "xglm",
        {
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
        },
        pre(),
    ),
    entry("biogpt", BERT, pre()),
    entry(
        "xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": VOCABULARY}, post()
    ),
    entry("starcoder2", LLAMA, pre()),
    entry("stablelm", {**NEOX, "num_key_value_heads": 4}, pre()),
    entry(
        "stablelm",
        {**NEOX, "num_key_value_heads": 4, "use_parallel_residual": True},
        pre(),
        scheme="parallel",
        name="stablelm-parallel",
    ),
    entry("nemotron", LLAMA, pre()),
    entry("persimmon", NEOX, pre()),
    entry("olmo", {k: v for k, v in LLAMA.items() if k != "head_dim"}, pre()),
    entry(
        "dbrx",
        {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "vocab_size": VOCABULARY,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
        pre(),
    ),
    *same(
        "llama mistral qwen2 qwen3 gemma glm"
        " helium smollm3 apertus seed_oss arcee ministral ministral3 phi3 "
        "ernie4_5 cwm hunyuan_v1_dense diffllama vaultgemma mellum nanochat",
        LLAMA,
        pre("rmsnorm"),
    ),
    *same("mixtral gpt_oss minimax_m2", MIXTURE, pre("rmsnorm")),
    entry("phimoe", MIXTURE, pre()),
    *same("qwen2_moe qwen3_moe olmoe", EXPERTS, pre("rmsnorm")),
    *same("deepseek_v2 deepseek_v3", DEEPSEEK, pre("rmsnorm")),
    # residual + hidden * residual_multiplier
    entry(
        "granite", {**LLAMA, "residual_multiplier": 0.22}, pre("rmsnorm", join="scaled", branch_scale=0.22)
    ),
    entry(
        "granitemoe",
        {**MIXTURE, "residual_multiplier": 0.22},
        pre("rmsnorm", join="scaled", branch_scale=0.22),
    ),
    *same("gemma2 gemma3_text glm4 afmoe", {**LLAMA, "sliding_window": 8}, placed("peri", "rmsnorm")),
    *same("olmo2 olmo3", {**LLAMA, "sliding_window": 8}, placed("res-post", "rmsnorm"), scheme="olmo2"),
    # norms on the q and k of each head, not of all of them
    entry("exaone4", {**LLAMA, "sliding_window": 8}, placed("res-post", "rmsnorm")),
    entry("flex_olmo", EXPERTS, placed("res-post", "rmsnorm"), scheme="olmo2"),
    # attn_sub_norm before o_proj, ffn_sub_norm before down_proj
    entry("bitnet", LLAMA, pre("rmsnorm"), scheme="sub-ln"),
    # input_residual * x + F(norm(x)), the factor a parameter
    entry("doge", LLAMA, pre("rmsnorm", join="learnt", stream_scale="learnt")),
    # x = norm(x); α·x + β·F(x): the add and the branch both take the normed stream, so Post-LN; model.norm is
    # the norm of the last sum
    entry(
        "minimax",
        {**MIXTURE, **ALPHA_BETA},
        post("rmsnorm", join="scaled", stream_scale=2.0, branch_scale=0.5),
    ),
    *same("mamba falcon_mamba", MAMBA, pre("rmsnorm", "O")),
    entry(
        "mamba2",
        {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
        pre("rmsnorm", "O"),
    ),
    entry(
        "rwkv",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "vocab_size": VOCABULARY,
        },
        pre("layernorm", "O F"),
    ),
    entry(
        "jamba",
        {
            **NEOX,
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),),
    ),
    entry(
        "lfm2",
        {**LLAMA, "layer_types": ["conv", "full_attention"]},
        (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),),
    ),
    entry(
        "recurrent_gemma",
        {**LLAMA, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),),
    ),
]
