"""Encoder-decoders, with the expected reading from their modelling code."""

from hf_base import BART, T5, entry, same
from readings import two_stacks

SEQ2SEQ = [
    *same("bart marian blenderbot-small mvp", BART, two_stacks("post"), inputs="seq2seq"),
    *same("mbart m2m_100 pegasus blenderbot", BART, two_stacks("pre"), inputs="seq2seq"),
    *same("t5 mt5 umt5", T5, two_stacks("pre", "rmsnorm"), inputs="seq2seq"),
    entry("longt5", {**T5, "local_radius": 4}, two_stacks("pre", "rmsnorm"), inputs="seq2seq"),
    entry(
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
    entry("plbart", BART, two_stacks("post"), inputs="seq2seq"),
    entry(
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
    entry(
        "bigbird_pegasus", {**BART, "attention_type": "original_full"}, two_stacks("pre"), inputs="seq2seq"
    ),
    entry(
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
