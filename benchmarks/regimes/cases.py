"""Ladders of the regimes; those held out and the fresh ones were fixed before any forecast of them was made.

One ladder is a model on its data with an optimiser, at each learning rate of `RATES`.
"""

import itertools

from benchmarks.regimes.builders import (
    bart,
    bert_like,
    block_series,
    cases_of,
    cases_of_text,
    causal,
    decoder,
    encoder,
    encoder_decoder,
    llama,
    opt,
    plain,
    plain_series,
    sizes,
    t5,
    vision,
    vit,
)
from benchmarks.regimes.feeds import digits, masked, pairs, series, tokens
from benchmarks.regimes.further_cases import EXPERTS, HALF, LARGE

TOKENS = cases_of_text(
    "tokens",
    1000,
    tokens,
    {
        "seen": [
            ("post 8 32 v512 tied", decoder("post", 8, 32, tie=True), "library", 512, "adamw"),
            ("pre 6 48 v2048", decoder("pre", 6, 48), "library", 2048, "adamw"),
            ("deepnorm 10 32 v2048 tied", decoder("deepnorm", 10, 32, tie=True), "library", 2048, "adam"),
            ("plain post 6 48 v512", plain(6, 48, norm_first=False, tie=False), "library", 512, "adam"),
            ("peri 6 32 v8192 tied", decoder("peri", 6, 32, tie=True), "library", 8192, "adamw"),
            ("gpt2 6 48 v2048", causal("gpt2", n_layer=6, n_embd=48, n_head=3), "library", 2048, "adamw"),
            ("post 5 48 v8192", decoder("post", 5, 48), "library", 8192, "adamw"),
            ("llama 5 48 v512", causal("llama", **llama(5, 48)), "library", 512, "adamw"),
            ("res-post 8 32 v2048", decoder("res-post", 8, 32), "library", 2048, "adam"),
            (
                "plain pre 4 48 v32000 tied",
                plain(4, 48, norm_first=True, tie=True),
                "library",
                32000,
                "adamw",
            ),
        ],
        "held-out": [
            ("post 7 48 v1024", decoder("post", 7, 48), "help", 1024, "adamw"),
            ("keel 6 48 v4096 tied", decoder("keel", 6, 48, tie=True), "licences", 4096, "adamw"),
            (
                "plain post 9 32 v1024 tied",
                plain(9, 32, norm_first=False, tie=True),
                "licences",
                1024,
                "adam",
            ),
            ("qwen2 5 64 v4096", causal("qwen2", **llama(5, 64)), "help", 4096, "adamw"),
            ("deepnorm 14 32 v1024", decoder("deepnorm", 14, 32), "help", 1024, "adamw"),
            ("gpt-neox 6 32 v16000", causal("gpt_neox", **sizes(6, 32)), "help", 16000, "adamw"),
            ("pre-no-final 8 48 v1024", decoder("pre-no-final", 8, 48), "licences", 1024, "adam"),
            ("mix-ln 8 32 v4096", decoder("mix-ln", 8, 32), "help", 4096, "adamw"),
            ("plain pre 7 64 v4096", plain(7, 64, norm_first=True, tie=False), "licences", 4096, "adam"),
            ("opt post 6 48 v1024", causal("opt", **opt(6, 48)), "licences", 1024, "adamw"),
        ],
        "fresh": [
            ("post 6 64 v2048", decoder("post", 6, 64), "modules", 2048, "adamw"),
            ("pre 9 32 v1024 tied", decoder("pre", 9, 32, tie=True), "modules", 1024, "adam"),
            (
                "plain post 5 48 v4096 tied",
                plain(5, 48, norm_first=False, tie=True),
                "modules",
                4096,
                "adamw",
            ),
            ("sub-ln 7 48 v4096", decoder("sub-ln", 7, 48), "modules", 4096, "adamw"),
            ("olmo2 5 48 v1024", causal("olmo2", **llama(5, 48)), "modules", 1024, "adamw"),
        ],
        "last": [
            ("res-post 6 48 v1024", decoder("res-post", 6, 48), "modules", 1024, "adam"),
            ("gpt2 4 48 v4096", causal("gpt2", n_layer=4, n_embd=48, n_head=3), "modules", 4096, "adamw"),
        ],
        "final": [
            ("peri 7 48 v2048", decoder("peri", 7, 48), "arrays", 2048, "adam"),
            ("opt post 5 48 v1024", causal("opt", **opt(5, 48)), "arrays", 1024, "adamw"),
        ],
        "confirm": [
            (
                "gpt2 5 64 v1024 dropout 0.3",
                causal(
                    "gpt2", n_layer=5, n_embd=64, n_head=4, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3
                ),
                "solvers",
                1024,
                "adamw",
            ),
            (
                "plain post 7 32 bytes dropout 0.2",
                plain(7, 32, norm_first=False, tie=False, dropout=0.2),
                "solvers",
                256,
                "adamw",
            ),
            ("qwen3 5 48 v2048", causal("qwen3", **llama(5, 48), head_dim=16), "solvers", 2048, "adamw"),
            ("deepnorm 7 48 v4096 tied", decoder("deepnorm", 7, 48, tie=True), "solvers", 4096, "adam"),
        ],
        "confirm-2": [
            ("res-post 7 48 v2048", decoder("res-post", 7, 48), "learners", 2048, "adamw"),
            ("llama 6 48 v512", causal("llama", **llama(6, 48)), "learners", 512, "adam"),
            ("post 5 32 v8192 tied", decoder("post", 5, 32, tie=True), "learners", 8192, "adamw"),
        ],
        "confirm-3": [
            ("peri 6 48 v1024", decoder("peri", 6, 48), "models", 1024, "adamw"),
            ("gpt-neox 5 48 v4096", causal("gpt_neox", **sizes(5, 48)), "models", 4096, "adam"),
        ],
    },
)


_ROBERTA = {"max_position_embeddings": 400, "pad_token_id": 256}

MASKED = cases_of_text(
    "masked",
    2000,
    masked,
    {
        "seen": [
            ("post 6 32 bytes", encoder("post", 6, 32), "library", 256, "adamw"),
            ("pre 8 32 v1024", encoder("pre", 8, 32), "library", 1024, "adamw"),
            ("bert 5 48 v1024", bert_like("bert", 5, 48), "library", 1024, "adamw"),
            ("deepnorm 10 32 bytes", encoder("deepnorm", 10, 32), "library", 256, "adam"),
            ("roberta 8 32 bytes", bert_like("roberta", 8, 32, **_ROBERTA), "library", 256, "adamw"),
            ("peri 6 48 v1024", encoder("peri", 6, 48), "library", 1024, "adam"),
        ],
        "held-out": [
            ("post 9 48 bytes", encoder("post", 9, 48), "help", 256, "adam"),
            ("bert 8 32 bytes", bert_like("bert", 8, 32), "licences", 256, "adamw"),
            ("res-post 7 32 v512", encoder("res-post", 7, 32), "help", 512, "adamw"),
            (
                "modernbert 6 48 v512",
                bert_like("modernbert", 6, 48, pad_token_id=0),
                "licences",
                512,
                "adamw",
            ),
            ("sub-ln 8 48 v512", encoder("sub-ln", 8, 48), "licences", 512, "adamw"),
            ("electra 6 48 v2048", bert_like("electra", 6, 48, embedding_size=48), "help", 2048, "adam"),
        ],
        "fresh": [
            ("pre 6 48 bytes", encoder("pre", 6, 48), "modules", 256, "adamw"),
            ("bert 4 48 v512", bert_like("bert", 4, 48), "modules", 512, "adam"),
        ],
        "last": [
            ("sub-ln 6 48 v1024", encoder("sub-ln", 6, 48), "modules", 1024, "adamw"),
            ("modernbert 5 48 v512", bert_like("modernbert", 5, 48, pad_token_id=0), "modules", 512, "adam"),
        ],
        "final": [
            ("post 6 48 v512", encoder("post", 6, 48), "arrays", 512, "adamw"),
            ("roberta 5 48 bytes", bert_like("roberta", 5, 48, **_ROBERTA), "arrays", 256, "adam"),
            ("peri 5 32 v1024", encoder("peri", 5, 32), "arrays", 1024, "adamw"),
        ],
        "confirm": [
            ("roformer 6 32 v512", bert_like("roformer", 6, 32), "solvers", 512, "adamw"),
            ("post 8 32 bytes", encoder("post", 8, 32), "solvers", 256, "adamw"),
            ("pre-no-final 5 48 v512", encoder("pre-no-final", 5, 48), "solvers", 512, "adam"),
        ],
        "confirm-2": [
            ("bert 6 48 v1024", bert_like("bert", 6, 48), "learners", 1024, "adamw"),
            ("deepnorm 6 48 bytes", encoder("deepnorm", 6, 48), "learners", 256, "adam"),
        ],
        "confirm-3": [
            ("pre 7 48 v512", encoder("pre", 7, 48), "models", 512, "adamw"),
        ],
    },
)


PAIRS = cases_of_text(
    "pairs",
    3000,
    pairs,
    {
        "seen": [
            ("post 4 32 bytes", encoder_decoder("post", 4, 32), "library", 256, "adamw"),
            ("pre 4 48 v512", encoder_decoder("pre", 4, 48), "library", 512, "adamw"),
            ("deepnorm 6 32 bytes", encoder_decoder("deepnorm", 6, 32), "library", 256, "adam"),
            ("t5 3 48 bytes", t5("t5", 3, 48), "library", 256, "adamw"),
            ("bart 3 48 v512", bart("bart", 3, 48), "library", 512, "adamw"),
        ],
        "held-out": [
            ("post 6 32 v1024", encoder_decoder("post", 6, 32), "help", 1024, "adam"),
            ("admin 5 32 bytes", encoder_decoder("admin", 5, 32), "licences", 256, "adamw"),
            ("marian 5 32 bytes", bart("marian", 5, 32), "help", 256, "adamw"),
            ("mt5 3 32 v1024", t5("mt5", 3, 32), "licences", 1024, "adamw"),
            ("pegasus 4 48 bytes", bart("pegasus", 4, 48), "licences", 256, "adam"),
        ],
        "fresh": [
            ("post 5 48 v512", encoder_decoder("post", 5, 48), "modules", 512, "adamw"),
            ("bart 4 32 bytes", bart("bart", 4, 32), "modules", 256, "adam"),
            ("pre 5 32 v1024", encoder_decoder("pre", 5, 32), "modules", 1024, "adamw"),
            # fresh, and fixed when diversity had come to leave out what positions tell
            ("marian 4 48 v512", bart("marian", 4, 48), "modules", 512, "adamw"),
            ("pegasus 3 32 v1024", bart("pegasus", 3, 32), "modules", 1024, "adamw"),
            ("scaled marian 4 32 bytes", bart("marian", 4, 32, scale_embedding=True), "modules", 256, "adam"),
        ],
        "last": [
            ("deepnorm 4 48 v512", encoder_decoder("deepnorm", 4, 48), "modules", 512, "adamw"),
            ("bart 3 32 v512", bart("bart", 3, 32), "modules", 512, "adamw"),
        ],
        "final": [
            ("post 4 48 v1024", encoder_decoder("post", 4, 48), "arrays", 1024, "adam"),
            ("marian 3 48 v512", bart("marian", 3, 48), "arrays", 512, "adamw"),
            ("admin 4 48 bytes", encoder_decoder("admin", 4, 48), "arrays", 256, "adamw"),
            ("mt5 3 48 v512", t5("mt5", 3, 48), "arrays", 512, "adam"),
        ],
        "confirm": [
            ("blenderbot-small 4 48 v512", bart("blenderbot-small", 4, 48), "solvers", 512, "adamw"),
            ("umt5 3 48 bytes", t5("umt5", 3, 48), "solvers", 256, "adamw"),
            ("res-post 4 32 bytes", encoder_decoder("res-post", 4, 32), "solvers", 256, "adam"),
        ],
        "confirm-2": [
            ("pre 3 48 v1024", encoder_decoder("pre", 3, 48), "learners", 1024, "adamw"),
            ("marian 4 48 bytes", bart("marian", 4, 48), "learners", 256, "adamw"),
        ],
        "confirm-3": [
            ("deepnorm 5 48 v512", encoder_decoder("deepnorm", 5, 48), "models", 512, "adam"),
        ],
    },
)


VISION = cases_of(
    "vision",
    4000,
    {
        "seen": [
            ("pre 6 32", vision("pre", 6, 32, 8, 2), digits("plain", "images"), "adamw"),
            ("post 8 32", vision("post", 8, 32, 8, 2), digits("plain", "images"), "adamw"),
            ("vit 6 48", vit("vit", 6, 48, 8, 2), digits("plain", "pixel_values"), "adamw"),
            ("deepnorm 12 32", vision("deepnorm", 12, 32, 8, 2), digits("plain", "images"), "adam"),
            ("swin-v2 8 32", vision("swin-v2", 8, 32, 8, 2), digits("plain", "images"), "adamw"),
            ("layerscale 8 48", vision("layerscale", 8, 48, 8, 2), digits("plain", "images"), "adamw"),
        ],
        "held-out": [
            ("post 12 48", vision("post", 12, 48, 16, 4), digits("noisy", "images"), "adam"),
            ("pre-no-final 6 48", vision("pre-no-final", 6, 48, 16, 4), digits("noisy", "images"), "adamw"),
            ("vit-msn 6 32", vit("vit_msn", 6, 32, 16, 4), digits("noisy", "pixel_values"), "adamw"),
            ("peri 9 32", vision("peri", 9, 32, 16, 4), digits("noisy", "images"), "adamw"),
            ("post 5 32", vision("post", 5, 32, 16, 4), digits("noisy", "images"), "adamw"),
            ("vit 10 48", vit("vit", 10, 48, 16, 4), digits("noisy", "pixel_values"), "adam"),
        ],
        # fresh, and fixed before larger learning rates counted in the rule
        "fresh": [
            ("pre 10 48", vision("pre", 10, 48, 16, 4), digits("noisy", "images"), "adam"),
            ("post 7 48", vision("post", 7, 48, 16, 4), digits("noisy", "images"), "adamw"),
            ("deepnorm 8 48", vision("deepnorm", 8, 48, 16, 4), digits("noisy", "images"), "adamw"),
            ("swin-v2 6 48", vision("swin-v2", 6, 48, 16, 4), digits("noisy", "images"), "adam"),
            ("sub-ln 5 32", vision("sub-ln", 5, 32, 16, 4), digits("noisy", "images"), "adamw"),
            ("vit 4 32", vit("vit", 4, 32, 16, 4), digits("noisy", "pixel_values"), "adamw"),
        ],
        "last": [
            ("mix-ln 6 32", vision("mix-ln", 6, 32, 16, 4), digits("noisy", "images"), "adamw"),
            ("post 10 32", vision("post", 10, 32, 16, 4), digits("noisy", "images"), "adam"),
            ("vit 7 48", vit("vit", 7, 48, 16, 4), digits("noisy", "pixel_values"), "adamw"),
            ("res-post 7 32", vision("res-post", 7, 32, 16, 4), digits("noisy", "images"), "adamw"),
            ("keel 6 48", vision("keel", 6, 48, 16, 4), digits("noisy", "images"), "adam"),
            ("pre 4 32", vision("pre", 4, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ],
        "final": [
            ("pre-no-final 8 32", vision("pre-no-final", 8, 32, 16, 4), digits("noisy", "images"), "adam"),
            ("post 6 48", vision("post", 6, 48, 16, 4), digits("noisy", "images"), "adamw"),
            ("deepnorm 10 32", vision("deepnorm", 10, 32, 16, 4), digits("noisy", "images"), "adamw"),
            ("vit-msn 5 48", vit("vit_msn", 5, 48, 16, 4), digits("noisy", "pixel_values"), "adam"),
            ("peri 6 48", vision("peri", 6, 48, 16, 4), digits("noisy", "images"), "adamw"),
        ],
        "confirm": [
            ("pre 7 48 gratings", vision("pre", 7, 48, 16, 4), digits("gratings", "images"), "adamw"),
            ("post 5 48 gratings", vision("post", 5, 48, 16, 4), digits("gratings", "images"), "adam"),
            ("vit 6 32 gratings", vit("vit", 6, 32, 16, 4), digits("gratings", "pixel_values"), "adamw"),
            ("sub-ln 8 48", vision("sub-ln", 8, 48, 16, 4), digits("noisy", "images"), "adamw"),
            ("deepnorm 6 32", vision("deepnorm", 6, 32, 16, 4), digits("noisy", "images"), "adam"),
        ],
        "confirm-2": [
            ("post 6 48 photographs", vision("post", 6, 48, 16, 4), digits("photographs", "images"), "adamw"),
            ("pre 9 32 photographs", vision("pre", 9, 32, 16, 4), digits("photographs", "images"), "adam"),
            (
                "vit 5 48 photographs",
                vit("vit", 5, 48, 16, 4),
                digits("photographs", "pixel_values"),
                "adamw",
            ),
            (
                "deepnorm 8 48 gratings",
                vision("deepnorm", 8, 48, 16, 4),
                digits("gratings", "images"),
                "adamw",
            ),
            ("peri 6 32 gratings", vision("peri", 6, 32, 16, 4), digits("gratings", "images"), "adam"),
            ("keel 8 32", vision("keel", 8, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ],
        "confirm-3": [
            ("post 7 32 gratings", vision("post", 7, 32, 16, 4), digits("gratings", "images"), "adamw"),
            ("vit 6 32", vit("vit", 6, 32, 16, 4), digits("noisy", "pixel_values"), "adam"),
            ("pre 6 48 photographs", vision("pre", 6, 48, 16, 4), digits("photographs", "images"), "adamw"),
        ],
    },
)


SERIES = cases_of(
    "series",
    5000,
    {
        "seen": [
            ("plain post 6 32", plain_series(6, 32, norm_first=False), series("waves"), "adam"),
            ("plain pre 6 32", plain_series(6, 32, norm_first=True), series("waves"), "adamw"),
            ("post 12 32", block_series("post", 12, 32, last=False), series("waves"), "adamw"),
            ("deepnorm 8 32", block_series("deepnorm", 8, 32, last=False), series("waves"), "adamw"),
            ("peri 6 48", block_series("peri", 6, 48, last=True), series("waves"), "adam"),
        ],
        "held-out": [
            ("plain post 10 48", plain_series(10, 48, norm_first=False), series("chaos"), "adamw"),
            ("plain pre 9 48", plain_series(9, 48, norm_first=True), series("chaos"), "adam"),
            ("post 7 48", block_series("post", 7, 48, last=False), series("chaos"), "adam"),
            ("res-post 6 32", block_series("res-post", 6, 32, last=True), series("chaos"), "adamw"),
            ("keel 6 32", block_series("keel", 6, 32, last=False), series("chaos"), "adamw"),
        ],
        "fresh": [
            ("deepnorm 6 48", block_series("deepnorm", 6, 48, last=False), series("chaos"), "adamw"),
            ("peri 5 32", block_series("peri", 5, 32, last=False), series("chaos"), "adam"),
        ],
        "last": [
            ("plain post 5 32", plain_series(5, 32, norm_first=False), series("chaos"), "adamw"),
            ("pre 8 48", block_series("pre", 8, 48, last=True), series("chaos"), "adamw"),
        ],
        "final": [
            ("deepnorm 9 32", block_series("deepnorm", 9, 32, last=True), series("chaos"), "adam"),
            ("plain post 8 48", plain_series(8, 48, norm_first=False), series("chaos"), "adamw"),
        ],
        "confirm": [
            ("plain pre 7 32", plain_series(7, 32, norm_first=True), series("convection"), "adamw"),
            ("post 9 32", block_series("post", 9, 32, last=False), series("convection"), "adam"),
            ("sub-ln 6 48", block_series("sub-ln", 6, 48, last=True), series("convection"), "adamw"),
            ("plain post 4 48", plain_series(4, 48, norm_first=False), series("convection"), "adamw"),
        ],
        "confirm-2": [
            ("plain post 6 48", plain_series(6, 48, norm_first=False), series("switching"), "adamw"),
            ("plain pre 5 48", plain_series(5, 48, norm_first=True), series("switching"), "adam"),
            ("post 5 32", block_series("post", 5, 32, last=True), series("switching"), "adamw"),
            ("deepnorm 7 48", block_series("deepnorm", 7, 48, last=False), series("switching"), "adamw"),
            ("keel 8 32", block_series("keel", 8, 32, last=True), series("switching"), "adam"),
        ],
        "confirm-3": [
            ("plain post 5 48", plain_series(5, 48, norm_first=False), series("storms"), "adam"),
            ("peri 6 32", block_series("peri", 6, 32, last=True), series("storms"), "adamw"),
        ],
    },
)

LONG = cases_of_text(
    "long",
    6000,
    tokens,
    {
        "seen": [
            ("post 6 32", decoder("post", 6, 32), "library", 256, "adamw"),
            ("pre 6 32", decoder("pre", 6, 32), "library", 256, "adamw"),
            ("res-post 8 32", decoder("res-post", 8, 32), "library", 256, "adam"),
            ("deepnorm 10 32", decoder("deepnorm", 10, 32), "library", 256, "adamw"),
        ],
        "held-out": [
            ("post 8 48", decoder("post", 8, 48), "help", 256, "adam"),
            ("plain pre 6 32", plain(6, 32, norm_first=True, tie=False), "licences", 256, "adamw"),
            ("keel 8 32", decoder("keel", 8, 32), "help", 256, "adamw"),
            ("gpt2 6 32", causal("gpt2", n_layer=6, n_embd=32, n_head=2), "licences", 256, "adamw"),
        ],
    },
    steps=3000,
)

REGIMES = {
    "tokens": TOKENS,
    "masked": MASKED,
    "pairs": PAIRS,
    "vision": VISION,
    "series": SERIES,
    "long": LONG,
    "large": LARGE,
    "bfloat16": HALF,
    "experts and state spaces": EXPERTS,
}
CASES = tuple(itertools.chain.from_iterable(REGIMES.values()))
