"""Models of images and sounds, with the expected reading from their modelling code."""

from hf_base import SWIN, VIT, WAVEFORM, entry, same
from readings import post, pre, stack

VISION = [
    *same("vit deit vit_msn", VIT, pre(), inputs="image"),
    entry("ijepa", VIT, pre(), inputs="image"),
    entry("clip_vision_model", VIT, pre(), inputs="image"),
    # the pooling head has its own residual after the last norm; it may be reported or not
    entry("siglip_vision_model", VIT, pre(), inputs="image", unread=None),
    *same("dinov2 dinov2_with_registers", VIT, pre(join="learnt", branch_scale="learnt"), inputs="image"),
    *same("beit data2vec-vision", VIT, pre(join="learnt", branch_scale="learnt"), inputs="image"),
    entry("swin", SWIN, pre(n=4), inputs="image"),
    entry(
        "swinv2",
        SWIN,
        (stack(*4 * ["A.res-post F.res-post"], final=True),),
        inputs="image",
        scheme="swin-v2",
    ),
    # pos_conv_embed(x) + x is before the blocks; it may be reported or not
    *same("wav2vec2 hubert unispeech", WAVEFORM, post(), inputs="waveform", unread=None),
    entry(
        "wav2vec2",
        {**WAVEFORM, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        pre(),
        inputs="waveform",
        unread=None,
        name="wav2vec2-stable",
    ),
]
