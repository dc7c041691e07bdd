"""Hugging Face model types with tiny configs, and the expected reading from their modelling code.

Every expectation was taken from the `forward` of the model's own file in transformers, not from our reader.
Where a model departs from its family, the comment says what the source does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from readings import StackReading, placed, post, pre, stack, two_stacks
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

VOCABULARY = 260


@dataclass(frozen=True)
class HFModel:
    """A model type, its options, its inputs, and its expected reading.

    Attributes:
        name: unique, the test's id.
        inputs: "text", "seq2seq", "image", "waveform" or "spectrogram".
        unread: whether something must be said in `unread`; None where both are right.
        one_stream: False where the stacks are not compared, only the blocks in order.
        scheme: catalogue name every branch must carry; None is not compared.
    """

    name: str
    model_type: str
    options: Mapping[str, Any]
    stacks: tuple[StackReading, ...]
    inputs: str = "text"
    unread: bool | None = False
    one_stream: bool = True
    scheme: str | None = None

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model with random weights in eval mode, and a batch of two."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **self.options)
        model = _head(config)._from_config(config).eval()
        return model, _batch(self.inputs, config)


def _head(config: Any) -> Any:
    """The class with a head where there is one: an encoder-decoder then runs both stacks."""
    both = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )
    mappings = (
        *(both if getattr(config, "is_encoder_decoder", False) else ()),
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_MAPPING,
    )
    found = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    return found[0] if isinstance(found, tuple) else found


def _batch(inputs: str, config: Any) -> dict[str, Tensor]:
    def ids(length: int) -> Tensor:
        return torch.randint(5, 200, (2, length))

    if inputs == "image":
        return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}
    if inputs == "waveform":
        return {"input_values": torch.randn(2, 800)}
    if inputs == "spectrogram":
        frames = 2 * config.max_source_positions
        features = torch.randn(2, config.num_mel_bins, frames)
        return {"input_features": features, "decoder_input_ids": ids(8)}
    if inputs == "seq2seq":
        return {"input_ids": ids(16), "decoder_input_ids": ids(8)}
    return {"input_ids": ids(16)}


LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
}
NEOX = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "head_dim")}
BERT = NEOX
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
GPTJ = {**GPT, "rotary_dim": 4}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCABULARY}
MIXTURE = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALPHA_BETA = {
    f"{branch}_{name}_factor": factor
    for branch in ("full_attn", "linear_attn", "mlp")
    for name, factor in (("alpha", 2.0), ("beta", 0.5))
}
DEEPSEEK = {
    **{key: LLAMA[key] for key in LLAMA if key != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WAVEFORM = {
    **{key: VIT[key] for key in VIT if key not in ("image_size", "patch_size")},
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def _text(
    model_type: str, options: Mapping[str, Any], stacks: tuple[StackReading, ...], **more: Any
) -> HFModel:
    return HFModel(more.pop("name", model_type), model_type, options, stacks, **more)


def _same(
    types: str, options: Mapping[str, Any], stacks: tuple[StackReading, ...], **more: Any
) -> list[HFModel]:
    """Add types whose configs share the family's names and whose readings are the same."""
    return [_text(model_type, options, stacks, **more) for model_type in types.split()]


CAUSAL = [
    *_same("gpt2 gpt_bigcode", GPT, pre()),
    # h = ln_2(n + mlp(n)), n = ln_1(x + attn(x)): the first GPT was Post-LN.
    _text("openai-gpt", GPT, post()),
    _text("ctrl", {**GPT, "dff": 48}, pre()),
    _text(
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
    _text("gpt_neox", NEOX, pre(), scheme="parallel"),
    _text("gpt_neox", {**NEOX, "use_parallel_residual": False}, pre(), name="gpt_neox-sequential"),
    # one norm for both branches
    _text("gptj", GPTJ, pre(), scheme="parallel"),
    _text("codegen", GPTJ, pre(), scheme="parallel"),
    _text("phi", NEOX, pre(), scheme="parallel"),
    _text("cohere", {k: v for k, v in LLAMA.items() if k != "head_dim"}, pre(), scheme="parallel"),
    _text("cohere2", LLAMA, pre(), scheme="parallel"),
    # mlp_output += attention_output, then dropout_add: in place.
    _text("falcon", NEOX, pre(), scheme="parallel"),
    _text(
        "falcon",
        {**NEOX, "new_decoder_architecture": True, "num_kv_heads": 2},
        pre(),
        scheme="parallel",
        name="falcon-two-norms",
    ),
    _text("falcon", {**NEOX, "parallel_attn": False}, pre(), name="falcon-sequential"),
    _text("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}, pre()),
    _text(
        "mpt",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "vocab_size": VOCABULARY},
        pre(),
    ),
    _text("opt", {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 32}, pre()),
    _text(
        "opt",
        {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        post(),
        name="opt-post",
    ),
    # project_in and project_out around the stack, as OPT-350m
    _text(
        "opt",
        {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        post(),
        name="opt-projected",
    ),
    _text(
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
    _text("biogpt", BERT, pre()),
    _text(
        "xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": VOCABULARY}, post()
    ),
    _text("starcoder2", LLAMA, pre()),
    _text("stablelm", {**NEOX, "num_key_value_heads": 4}, pre()),
    _text(
        "stablelm",
        {**NEOX, "num_key_value_heads": 4, "use_parallel_residual": True},
        pre(),
        scheme="parallel",
        name="stablelm-parallel",
    ),
    _text("nemotron", LLAMA, pre()),
    _text("persimmon", NEOX, pre()),
    _text("olmo", {k: v for k, v in LLAMA.items() if k != "head_dim"}, pre()),
    _text(
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
    *_same(
        "llama mistral qwen2 qwen3 gemma glm"
        " helium smollm3 apertus seed_oss arcee ministral ministral3 phi3 "
        "ernie4_5 cwm hunyuan_v1_dense diffllama vaultgemma mellum nanochat",
        LLAMA,
        pre("rmsnorm"),
    ),
    *_same("mixtral gpt_oss minimax_m2", MIXTURE, pre("rmsnorm")),
    _text("phimoe", MIXTURE, pre()),
    *_same("qwen2_moe qwen3_moe olmoe", EXPERTS, pre("rmsnorm")),
    *_same("deepseek_v2 deepseek_v3", DEEPSEEK, pre("rmsnorm")),
    # residual + hidden * residual_multiplier
    _text(
        "granite", {**LLAMA, "residual_multiplier": 0.22}, pre("rmsnorm", join="scaled", branch_scale=0.22)
    ),
    _text(
        "granitemoe",
        {**MIXTURE, "residual_multiplier": 0.22},
        pre("rmsnorm", join="scaled", branch_scale=0.22),
    ),
    *_same("gemma2 gemma3_text glm4 afmoe", {**LLAMA, "sliding_window": 8}, placed("peri", "rmsnorm")),
    *_same("olmo2 olmo3", {**LLAMA, "sliding_window": 8}, placed("res-post", "rmsnorm"), scheme="olmo2"),
    # norms on the q and k of each head, not of all of them
    _text("exaone4", {**LLAMA, "sliding_window": 8}, placed("res-post", "rmsnorm")),
    _text("flex_olmo", EXPERTS, placed("res-post", "rmsnorm"), scheme="olmo2"),
    # attn_sub_norm before o_proj, ffn_sub_norm before down_proj
    _text("bitnet", LLAMA, pre("rmsnorm"), scheme="sub-ln"),
    # input_residual * x + F(norm(x)), the factor a parameter
    _text("doge", LLAMA, pre("rmsnorm", join="learnt", stream_scale="learnt")),
    # x = norm(x); α·x + β·F(x): the add and the branch both take the normed stream, so Post-LN; model.norm is
    # the norm of the last sum
    _text(
        "minimax",
        {**MIXTURE, **ALPHA_BETA},
        post("rmsnorm", join="scaled", stream_scale=2.0, branch_scale=0.5),
    ),
    *_same("mamba falcon_mamba", MAMBA, pre("rmsnorm", "O")),
    _text(
        "mamba2",
        {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
        pre("rmsnorm", "O"),
    ),
    _text(
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
    _text(
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
    _text(
        "lfm2",
        {**LLAMA, "layer_types": ["conv", "full_attention"]},
        (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),),
    ),
    _text(
        "recurrent_gemma",
        {**LLAMA, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),),
    ),
]

ENCODERS = [
    *_same(
        "bert camembert xlm-roberta ernie data2vec-text rembert roformer deberta deberta-v2 "
        "roberta layoutlm bert-generation mpnet",
        BERT,
        post(),
    ),
    _text("roc_bert", {**BERT, "pronunciation_vocab_size": 8, "shape_vocab_size": 8}, post()),
    _text("electra", {**BERT, "embedding_size": 16}, post()),
    _text("squeezebert", {**BERT, "embedding_size": 32}, post()),
    _text("convbert", {**BERT, "embedding_size": 32}, post()),
    _text("nystromformer", {**BERT, "num_landmarks": 4, "segment_means_seq_len": 16}, post()),
    _text(
        "distilbert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCABULARY},
        post(),
    ),
    # one module called twelve times: a block a call
    _text("albert", {**BERT, "embedding_size": 16, "num_hidden_layers": 3}, post(n=3)),
    _text("longformer", {**BERT, "attention_window": 4}, post()),
    _text("big_bird", {**BERT, "attention_type": "original_full"}, post()),
    _text(
        "big_bird",
        {**BERT, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        post(),
        name="big_bird-sparse",
    ),
    _text("fnet", {k: v for k, v in BERT.items() if k != "num_attention_heads"}, post(branches="O F")),
    _text("xlm", XLM, post()),
    _text("flaubert", XLM, post()),
    _text("ibert", BERT, post()),
    _text("luke", {**BERT, "entity_vocab_size": 16, "entity_emb_size": 8}, post()),
    *_same("megatron-bert roberta-prelayernorm xlm-roberta-xl", BERT, pre()),
    _text("esm", {**BERT, "position_embedding_type": "rotary", "mask_token_id": 4}, pre()),
    _text("nomic_bert", BERT, post()),
    _text("eurobert", LLAMA, pre("rmsnorm")),
    # the first block's attention norm is an Identity: nothing sits between the stream and that attention
    _text(
        "modernbert",
        {**BERT, "num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 3},
        (stack("A.none F.pre", "A.pre F.pre", "A.pre F.pre", norm="layernorm", final=True),),
    ),
    # the decoder starts from upsample(deep) + first block: a long skip, which is reported
    _text(
        "funnel",
        {
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "block_sizes": [1, 2],
            "num_decoder_layers": 1,
            "vocab_size": VOCABULARY,
        },
        post(n=4),
        one_stream=False,
        unread=True,
    ),
    # bottlenecks around a narrow stream of its own: a residual inside a residual
    _text("mobilebert", {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16}, (), unread=True),
    _text(
        "mobilebert",
        {
            **BERT,
            "embedding_size": 16,
            "use_bottleneck": False,
            "num_feedforward_networks": 2,
            "normalization_type": "layer_norm",
        },
        post(branches="A F F"),
        name="mobilebert-wide",
    ),
    _text("clip_text_model", BERT, pre()),
]

SEQ2SEQ = [
    *_same("bart marian blenderbot-small mvp", BART, two_stacks("post"), inputs="seq2seq"),
    *_same("mbart m2m_100 pegasus blenderbot", BART, two_stacks("pre"), inputs="seq2seq"),
    *_same("t5 mt5 umt5", T5, two_stacks("pre", "rmsnorm"), inputs="seq2seq"),
    _text("longt5", {**T5, "local_radius": 4}, two_stacks("pre", "rmsnorm"), inputs="seq2seq"),
    _text(
        "switch_transformers",
        {
            **T5,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
        },
        two_stacks("pre", "rmsnorm"),
        inputs="seq2seq",
    ),
    # final_layer_norm closes every layer of both stacks
    _text("plbart", BART, two_stacks("post"), inputs="seq2seq"),
    _text(
        "led",
        {
            **BART,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        two_stacks("post"),
        inputs="seq2seq",
    ),
    _text(
        "bigbird_pegasus", {**BART, "attention_type": "original_full"}, two_stacks("pre"), inputs="seq2seq"
    ),
    _text(
        "whisper",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 32,
        },
        two_stacks("pre"),
        inputs="spectrogram",
    ),
]

VISION = [
    *_same("vit deit vit_msn", VIT, pre(), inputs="image"),
    _text("ijepa", VIT, pre(), inputs="image"),
    _text("clip_vision_model", VIT, pre(), inputs="image"),
    # the pooling head has its own residual after the last norm; it may be reported or not
    _text("siglip_vision_model", VIT, pre(), inputs="image", unread=None),
    *_same("dinov2 dinov2_with_registers", VIT, pre(join="learnt", branch_scale="learnt"), inputs="image"),
    *_same("beit data2vec-vision", VIT, pre(join="learnt", branch_scale="learnt"), inputs="image"),
    _text("swin", SWIN, pre(n=4), inputs="image"),
    _text(
        "swinv2",
        SWIN,
        (stack(*4 * ["A.res-post F.res-post"], final=True),),
        inputs="image",
        scheme="swin-v2",
    ),
    # pos_conv_embed(x) + x is before the blocks; it may be reported or not
    *_same("wav2vec2 hubert unispeech", WAVEFORM, post(), inputs="waveform", unread=None),
    _text(
        "wav2vec2",
        {**WAVEFORM, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        pre(),
        inputs="waveform",
        unread=None,
        name="wav2vec2-stable",
    ),
]

MODELS = [*CAUSAL, *ENCODERS, *SEQ2SEQ, *VISION]
