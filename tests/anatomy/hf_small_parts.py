"""Models of images or sounds with text that are given text alone: the expected reading of the text model."""

from hf_base import made
from hf_small_text import DELTA
from readings import placed, pre, stack

PARTS = [
    *made(
        "audioflamingo3 musicflamingo qwen2_audio moss_transcribe_diarize voxtral glmasr got_ocr2 internvl "
        "llava llava_next llava_next_video llava_onevision video_llava vipllava ovis2 qianfan_ocr qwen3_asr "
        "video_llama_3 mistral3 lighton_ocr idefics2 idefics3 smolvlm deepseek_vl deepseek_vl_hybrid janus "
        "colpali paligemma cosmos3_edge cosmos3_omni qwen3_vl qwen3_vl_moe qwen3_omni_moe_thinker "
        "minimax_m3_vl unlimited_ocr ultravbert phi4_multimodal",
        pre("rmsnorm"),
    ),
    *made(
        "hunyuan_vl kimi_k25 glm4v_moe paddleocr_vl qwen2_vl qwen2_5_vl qwen2_5_omni_thinker", pre("rmsnorm")
    ),
    *made("llama4 lfm2_vl mistral_large4", pre("rmsnorm", n=4)),
    *made("kosmos-2.5", pre()),
    *made("aya_vision cohere2_vision", pre(), scheme="parallel"),
    *made("gemma3 shieldgemma2 muse_glimmer glm4v glm_image glm_ocr", placed("peri", "rmsnorm")),
    *made("hyperclovax_vision_v2 gemma4_unified", placed("peri", "rmsnorm")),
    *made("exaone4_5", placed("res-post", "rmsnorm")),
    *made("granite_speech granite_speech_plus", pre("rmsnorm")),
    # residual_multiplier 0.263 by default
    *made("granite_docling", pre("rmsnorm", join="scaled", branch_scale=0.263)),
    *made("nemotron_h_omni", (stack("O.pre", "F.pre", "A.pre", "F.pre", norm="rmsnorm", final=True),)),
    *made("lfm3_vl", (stack("O.peri F.peri", *2 * ["A.peri F.peri"], norm="rmsnorm", final=True),)),
    # gated DeltaNet in the first block
    *made("qwen3_5 qwen3_5_moe minicpm_ocr minicpmv4_6 minicpmv4_7", DELTA),
    *made("modernvbert colmodernvbert", (stack("A.none F.pre", "A.pre F.pre", final=True),)),
    *made(
        "gemma4 embedding_gemma2",
        (stack(*2 * ["A.peri F.peri F.res-post"], norm="rmsnorm", final=True),),
    ),
]
