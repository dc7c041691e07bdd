"""Language models and encoders of text that `benchmarks.hf.small` builds, with the expected reading.

The comment says what a source does where the model departs from its family.
"""

from math import sqrt

from hf_base import made
from readings import placed, post, pre, stack, two_stacks

DELTA = (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),)
STREAMS = {"join": "streams", "branch_scale": "learnt"}

DECODERS = [
    *made("gpt-sw3 gpt_neox_japanese jais2 fuyu clvp_decoder decision_transformer", pre()),
    *made("musicgen_decoder musicgen_melody_decoder pp_formulanet_text canary_decoder", pre()),
    # ffn_layernorm before fc2; Kosmos-2 has inner_attn_ln before out_proj too
    *made("kosmos_2_text_model kosmos_2_5_text_model", pre()),
    # ImageGPTLayerNorm divides by sqrt(mean(x²)) and takes no mean away; so does CpmAntLayerNorm
    *made("imagegpt cpmant", pre("rmsnorm")),
    *made(
        "aria_text cosmos3_edge_text csm csm_depth_decoder_model ernie4_5_moe flint glm4_moe hunyuan_v1_moe "
        "hy_v3 laguna solar_open step3p5 unlimited_ocr_text emu3_text_model minimax_m3_vl_text jetmoe "
        "qwen3_omni_moe_text qwen3_omni_moe_talker_code_predictor qwen3_vl_text qwen3_vl_moe_text "
        "kyutai_speech_to_text moshi mllama mllama_text_model blt_patcher",
        pre("rmsnorm"),
    ),
    *made(
        "deepseek_v32 glm4_moe_lite glm_moe_dsa mistral4 youtu hunyuan_vl_text paddleocr_vl_text "
        "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text glm4v_moe_text",
        pre("rmsnorm"),
    ),
    # y * sigmoid(mlp(y)) with y = norm(x), before the sublayer
    # the experts end in post_mlp_layernorm, the dense first block does not
    *made("axk1", (stack("A.pre F.pre", "A.pre F.peri", norm="rmsnorm", final=True),)),
    *made("axk2", pre("rmsnorm")),
    *made("exaone_moe mimo_v2_flash", pre("rmsnorm", n=3)),
    *made("llama4_text molmo2_text mistral_large4_text", pre("rmsnorm", n=4)),
    # no norm after the last layer: the decoder that reads it has its own
    *made("blt_global_transformer", (stack(*2 * ["A.pre F.pre"], norm="rmsnorm", final=False),)),
    *made("cohere2_moe", pre(), scheme="parallel"),
    # residual + hidden * residual_multiplier
    *made(
        "granitemoeshared granite_swa granitemoe_swa granite4_vision_text granite_docling_text",
        pre("rmsnorm", join="scaled", branch_scale=0.22),
        options={"residual_multiplier": 0.22},
    ),
    # scale_depth / sqrt(layers)
    *made("minicpm3", pre("rmsnorm", join="scaled", branch_scale=1.4 / sqrt(2))),
    # (residual + b)·s + (hidden + b')·s', all four learnt vectors
    # beside it a second stream, of the routers' states
    *made(
        "zaya",
        pre("rmsnorm", join="learnt", stream_scale="learnt", branch_scale="learnt"),
        readable=False,
    ),
    # norms of text and of sound, each written over its part of the stream by masked_scatter
    *made("higgs_audio_v2", pre("rmsnorm"), readable=False),
    *made("glm4v_text glm_image_text glm_ocr_text kolibri1", placed("peri", "rmsnorm")),
    *made("muse_glimmer_text gemma4_unified_text", placed("peri", "rmsnorm")),
    *made(
        "hyperclovax",
        placed("peri", "rmsnorm", join="scaled", branch_scale=0.22),
        options={"residual_multiplier": 0.22},
    ),
    # α·residual + β·norm(F(norm(x))), both computed from a parameter
    *made(
        "muse_spark_text",
        placed("peri", "rmsnorm", join="learnt", stream_scale="learnt", branch_scale="learnt"),
    ),
    # a third branch: norm(W₂(act(W₁x) ∘ per-layer input)), without a norm before it; layer_scalar is 1
    *made(
        "gemma4_text embedding_gemma2_text",
        (stack(*2 * ["A.peri F.peri F.res-post"], norm="rmsnorm", final=True),),
    ),
    # the first attention norm is an Identity
    *made("modernbert-decoder", (stack("A.none F.pre", "A.pre F.pre", final=True),)),
    # gated DeltaNet, a short convolution and a decaying state, in the first block: "other", as Mamba-2 is
    *made("qwen3_5_text qwen3_5_moe_text qwen3_next", DELTA),
    *made("kimi_linear", (stack(*2 * ["O.pre F.pre"], "A.pre F.pre", norm="rmsnorm", final=True),)),
    # a DeltaNet block is Pre-LN, an attention block ends its branches in norms
    *made(
        "olmo_hybrid",
        (stack("O.pre F.pre", "A.res-post F.res-post", norm="rmsnorm", final=True),),
    ),
    # Mamba-2 and attention beside each other on one norm
    *made("falcon_h1", pre("rmsnorm", "O A F")),
    # one branch a block: Mamba-2, experts, attention, feed-forward
    *made("nemotron_h", (stack("O.pre", "F.pre", "A.pre", "F.pre", norm="rmsnorm", final=True),)),
    *made(
        "granitemoehybrid",
        (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True, join="scaled", branch_scale=0.22),),
        options={"residual_multiplier": 0.22},
    ),
    *made("lfm2_moe", (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=True),)),
    *made(
        "lfm3",
        (stack("O.peri F.peri", *2 * ["A.peri F.peri"], norm="rmsnorm", final=True),),
    ),
    # H ← combᵀH + post ⊗ F(norm(pre·H)) over several streams
    *made("deepseek_v4", pre("rmsnorm", n=3, stream_scale="learnt", **STREAMS)),
    # the same without comb
    *made("hy_v4", pre("rmsnorm", n=3, **STREAMS), readable=False),
]

READERS = [
    *made("align_text_model chinese_clip_text_model clap_text_model bridgetower_text_model dpr", post()),
    *made("markuplm splinter visual_bert tapas layoutlmv3 yoso gte jina_embeddings_v3", post()),
    *made("instructblip_qformer instructblipvideo_qformer trocr", post()),
    # pre_LN reads what the last Post-LN layer gives
    *made("altclip_text_model", (stack(*2 * ["A.post F.post"], final=True),)),
    # speech and detection stacks on made embeddings: the encoder's output is not given, so none attends to it
    *made("speecht5 conditional_detr", post()),
    # the Post-LN decoder of DETR ends in one more LayerNorm
    *made("detr", (stack(*2 * ["A.post F.post"], final=True),)),
    # the closing norm is called before the language's adapter x + W₂(act(W₁x)) and again after it
    *made("xmod", (stack(*2 * ["A.post F.post F.post"], final=False),)),
    *made("clipseg_text_model groupvit_text_model metaclip_2_text_model owlv2_text_model", pre()),
    *made("owlvit_text_model siglip_text_model siglip2_text_model tipsv2_text_model xclip_text_model", pre()),
    # F.layer_norm with weight + 1
    *made("videoprism_text_model flava_text_model flava_multimodal_model", pre()),
    # the experts' sum times num_experts_per_tok
    *made("openai_privacy_filter", pre("rmsnorm", by_kind={"F": ("scaled", None, 2.0)})),
    *made("aimv2_text_model ultrabert", pre("rmsnorm")),
]

PAIRS = [
    *made("seamless_m4t seamless_m4t_v2 nllb-moe", two_stacks("pre")),
    *made("fsmt prophetnet encoder-decoder", two_stacks("post")),
    *made("dia pop2piano", two_stacks("pre", "rmsnorm")),
    *made("t5gemma", two_stacks("peri", "rmsnorm")),
    # the decoder attends to itself and to the encoder in one softmax
    *made("t5gemma2", (*placed("peri", "rmsnorm"), *placed("peri", "rmsnorm"))),
    *made("t5gemma2_encoder t5gemma2_text", placed("peri", "rmsnorm")),
    *made("udop", pre("rmsnorm")),
]
