"""Models of images, series and sounds that `benchmarks.hf.small` builds, with the expected reading."""

from hf_base import made
from readings import post, pre, stack, two_stacks

NO_FINAL = (stack(*2 * ["A.pre F.pre"], final=False),)
LAYER_SCALE = {"join": "learnt", "branch_scale": "learnt"}
HALF = ("scaled", None, 0.5)

CONFORMER = "F.pre A.pre O.pre F.post"
"""x + F(norm(x))/2, attention, convolution, x + F(norm(x))/2, then a norm on the stream."""

IMAGES = [
    *made("altclip_vision_model chinese_clip_vision_model clip clipseg_vision_model git_vision_model", pre()),
    *made(
        "metaclip_2 metaclip_2_vision_model owlv2_vision_model owlvit_vision_model mlcd_vision_model", pre()
    ),
    *made(
        "mlcd kosmos_2_vision_model idefics2_vision idefics3_vision janus_vision_model smolvlm_vision", pre()
    ),
    *made("blip_vision_model blip_2_vision_model instructblip_vision_model", pre()),
    *made("instructblipvideo_vision_model flava_image_model vit_mae dpt yolos pixio", pre()),
    *made("video_llama_3_vision vivit vitpose vitpose_backbone vilt cosmos3_edge_vision", pre()),
    # the three heads' token_norm read what the last layer gives
    *made("mgp-str", pre()),
    # patch_merger.before_rms reads what the last layer gives
    *made("hunyuan_vl_vision", pre()),
    # a pooling head with its own residual after the last norm; it may be reported or not
    *made("siglip siglip2_vision_model phi4_multimodal_vision", pre(), unread=None),
    # an encoder and a predictor of the same layers, each with its norm
    *made("vjepa2", (*pre(), *pre())),
    *made("aimv2_vision_model ovis2_vision", pre("rmsnorm", "A F"), options={}),
    # merger.ln_q or merger.norm reads what the last layer gives
    *made("qwen2_vl_vision qwen3_5_vision qwen3_5_moe_vision qwen4_exp_vision ernie4_5_vl_moe_vision", pre()),
    *made("qwen3_vl_vision qwen3_vl_moe_vision cohere_compass_vision qwen3_omni_moe_vision_encoder", pre()),
    *made("qwen2_5_vl_vision qwen2_5_omni_vision_encoder exaone4_5_vision", pre("rmsnorm")),
    *made("glm4v_vision glm4v_moe_vision glm_ocr_vision glm5_next_vision", pre("rmsnorm")),
    # the neck begins with a convolution
    *made(
        "sam_vision_model sam_hq_vision_model got_ocr2_vision slanext_vision pp_formulanet_vision", NO_FINAL
    ),
    *made("deepseek_ocr2_sam_vision_model unlimited_ocr_sam_vision_model vitdet", NO_FINAL),
    # layer_norm is before the layers
    *made("sam3_vit_model minimax_m3_vl_vision glm_image_vision", NO_FINAL),
    # mean pooling: the head has the norm
    *made("videomae", NO_FINAL),
    # Kosmos2_5LayerNorm takes no mean away; embedding_norm is before the layers
    *made("pixtral kosmos_2_5_vision_model", (stack(*2 * ["A.pre F.pre"], norm="rmsnorm", final=False),)),
    *made("lfm3_vl_vision", (stack("O.pre F.pre", "A.pre F.pre", norm="rmsnorm", final=False),)),
    *made("gemma4_vision", (stack(*2 * ["A.peri F.peri"], norm="rmsnorm", final=False),)),
    *made("timesfm2_5", (stack(*2 * ["A.peri F.peri"], norm="rmsnorm", final=False),)),
    # RMSNorm before attention, LayerNorm inside the MLP's module
    *made("timesfm", (stack(*2 * ["A.pre.rmsnorm F.pre.layernorm"], final=False),)),
    *made("patchtst", (stack(*2 * ["A.pre F.pre"], norm="batchnorm", final=False),)),
    *made("dinov3_vit tipsv2_vision_model", pre(**LAYER_SCALE)),
    *made("rf_detr_dinov2", pre(n=4, **LAYER_SCALE)),
    *made(
        "radio internvl_vision qianfan_ocr_vision step3p5_vision lw_detr_vit",
        (stack(*2 * ["A.pre F.pre"], final=False, **LAYER_SCALE),),
    ),
    # two stages of two blocks
    *made("maskformer-swin", pre(n=4)),
    *made("donut-swin", (stack(*4 * ["A.pre F.pre"], final=False),)),
    # four stages of two blocks
    *made("pvt", pre(n=8)),
]

SOUNDS = [
    *made("audioflamingo3_encoder qwen2_audio_encoder voxtral_encoder moss_transcribe_diarize_audio", pre()),
    *made("glmasr_encoder nemotron3_diarization_audio nemotron3_5_transcribe_asr_audio", pre()),
    *made("audio-spectrogram-transformer moonshine_streaming_encoder", pre()),
    *made("dia_encoder voxtral_realtime_encoder", pre("rmsnorm")),
    *made("speech_to_text moonshine_streaming", two_stacks("pre")),
    # pos_conv_embed(x) + x, or pool(x) + pos_conv_embed(x), before the blocks; it may be reported or not
    *made("wavlm unispeech-sat data2vec-audio sew sew-d", post(), unread=None),
    *made(
        "parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt nemotron_asr_streaming_encoder "
        "nemotron_asr_streaming nemotron3_5_asr wav2vec2-bert",
        (stack(*2 * [CONFORMER], final=False, by_kind={"F": HALF}),),
    ),
    *made("wav2vec2-conformer", (stack(*2 * [CONFORMER], final=True, by_kind={"F": HALF}),)),
    # 1.5·x + 0.5·F(x), 2·x + conv(x)
    *made(
        "lasr_encoder lasr_ctc",
        (
            stack(
                *2 * [CONFORMER],
                final=True,
                by_kind={"F": ("scaled", 1.5, 0.5), "O": ("scaled", 2.0, None)},
            ),
        ),
    ),
    *made(
        "canary cohere_asr",
        (
            stack(*2 * [CONFORMER], final=False, by_kind={"F": HALF}),
            stack(*2 * ["A.pre X.pre F.pre"], final=True),
        ),
    ),
    *made("speech-encoder-decoder", two_stacks("post"), unread=None),
    *made("vision-encoder-decoder", (*pre(), stack(*2 * ["A.post X.post F.post"], final=False))),
]
