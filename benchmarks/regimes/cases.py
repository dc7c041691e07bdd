"""Ladders of the regimes; those held out and the fresh ones were fixed before any forecast of them was made.

One ladder is a model on its data with an optimiser, at each learning rate of `RATES`.
"""

import itertools
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.regimes.builders import (
    Model,
    cases_of,
    cases_of_text,
    causal,
    decoder,
    llama,
    opt,
    plain,
    sizes,
)
from benchmarks.regimes.feeds import digits, masked, pairs, series, tokens
from benchmarks.regimes.further_cases import EXPERTS, HALF, LARGE
from benchmarks.regimes.models import BlockSeries, PlainSeries, of_transformers, ours

TOKENS = cases_of_text(
    "tokens",
    1000,
    tokens,
    [
        ("post 8 32 v512 tied", decoder("post", 8, 32, tie=True), "library", 512, "adamw"),
        ("pre 6 48 v2048", decoder("pre", 6, 48), "library", 2048, "adamw"),
        ("deepnorm 10 32 v2048 tied", decoder("deepnorm", 10, 32, tie=True), "library", 2048, "adam"),
        ("plain post 6 48 v512", plain(6, 48, norm_first=False, tie=False), "library", 512, "adam"),
        ("peri 6 32 v8192 tied", decoder("peri", 6, 32, tie=True), "library", 8192, "adamw"),
        ("gpt2 6 48 v2048", causal("gpt2", n_layer=6, n_embd=48, n_head=3), "library", 2048, "adamw"),
        ("post 5 48 v8192", decoder("post", 5, 48), "library", 8192, "adamw"),
        ("llama 5 48 v512", causal("llama", **llama(5, 48)), "library", 512, "adamw"),
        ("res-post 8 32 v2048", decoder("res-post", 8, 32), "library", 2048, "adam"),
        ("plain pre 4 48 v32000 tied", plain(4, 48, norm_first=True, tie=True), "library", 32000, "adamw"),
        # held out
        ("post 7 48 v1024", decoder("post", 7, 48), "help", 1024, "adamw"),
        ("keel 6 48 v4096 tied", decoder("keel", 6, 48, tie=True), "licences", 4096, "adamw"),
        ("plain post 9 32 v1024 tied", plain(9, 32, norm_first=False, tie=True), "licences", 1024, "adam"),
        ("qwen2 5 64 v4096", causal("qwen2", **llama(5, 64)), "help", 4096, "adamw"),
        ("deepnorm 14 32 v1024", decoder("deepnorm", 14, 32), "help", 1024, "adamw"),
        ("gpt-neox 6 32 v16000", causal("gpt_neox", **sizes(6, 32)), "help", 16000, "adamw"),
        ("pre-no-final 8 48 v1024", decoder("pre-no-final", 8, 48), "licences", 1024, "adam"),
        ("mix-ln 8 32 v4096", decoder("mix-ln", 8, 32), "help", 4096, "adamw"),
        ("plain pre 7 64 v4096", plain(7, 64, norm_first=True, tie=False), "licences", 4096, "adam"),
        ("opt post 6 48 v1024", causal("opt", **opt(6, 48)), "licences", 1024, "adamw"),
        # fresh
        ("post 6 64 v2048", decoder("post", 6, 64), "modules", 2048, "adamw"),
        ("pre 9 32 v1024 tied", decoder("pre", 9, 32, tie=True), "modules", 1024, "adam"),
        ("plain post 5 48 v4096 tied", plain(5, 48, norm_first=False, tie=True), "modules", 4096, "adamw"),
        ("sub-ln 7 48 v4096", decoder("sub-ln", 7, 48), "modules", 4096, "adamw"),
        ("olmo2 5 48 v1024", causal("olmo2", **llama(5, 48)), "modules", 1024, "adamw"),
        # last
        ("res-post 6 48 v1024", decoder("res-post", 6, 48), "modules", 1024, "adam"),
        ("gpt2 4 48 v4096", causal("gpt2", n_layer=4, n_embd=48, n_head=3), "modules", 4096, "adamw"),
        # final
        ("peri 7 48 v2048", decoder("peri", 7, 48), "arrays", 2048, "adam"),
        ("opt post 5 48 v1024", causal("opt", **opt(5, 48)), "arrays", 1024, "adamw"),
    ],
    held=10,
    fresh=5,
    last=2,
    final=2,
)


def _encoder(scheme: str, depth: int, width: int) -> Model:
    return Model(lambda vocab: ours("encoder", scheme, depth, width, vocab=vocab + 1), "ids")


def _bert_like(model_type: str, depth: int, width: int, **options: Any) -> Model:
    def build(vocab: int) -> nn.Module:
        shape = sizes(depth, width) | {"vocab_size": vocab + 1} | options
        return of_transformers("AutoModelForMaskedLM", model_type, **shape)

    return Model(build, "input_ids")


_ROBERTA = {"max_position_embeddings": 400, "pad_token_id": 256}

MASKED = cases_of_text(
    "masked",
    2000,
    masked,
    [
        ("post 6 32 bytes", _encoder("post", 6, 32), "library", 256, "adamw"),
        ("pre 8 32 v1024", _encoder("pre", 8, 32), "library", 1024, "adamw"),
        ("bert 5 48 v1024", _bert_like("bert", 5, 48), "library", 1024, "adamw"),
        ("deepnorm 10 32 bytes", _encoder("deepnorm", 10, 32), "library", 256, "adam"),
        ("roberta 8 32 bytes", _bert_like("roberta", 8, 32, **_ROBERTA), "library", 256, "adamw"),
        ("peri 6 48 v1024", _encoder("peri", 6, 48), "library", 1024, "adam"),
        # held out
        ("post 9 48 bytes", _encoder("post", 9, 48), "help", 256, "adam"),
        ("bert 8 32 bytes", _bert_like("bert", 8, 32), "licences", 256, "adamw"),
        ("res-post 7 32 v512", _encoder("res-post", 7, 32), "help", 512, "adamw"),
        ("modernbert 6 48 v512", _bert_like("modernbert", 6, 48, pad_token_id=0), "licences", 512, "adamw"),
        ("sub-ln 8 48 v512", _encoder("sub-ln", 8, 48), "licences", 512, "adamw"),
        ("electra 6 48 v2048", _bert_like("electra", 6, 48, embedding_size=48), "help", 2048, "adam"),
        # fresh
        ("pre 6 48 bytes", _encoder("pre", 6, 48), "modules", 256, "adamw"),
        ("bert 4 48 v512", _bert_like("bert", 4, 48), "modules", 512, "adam"),
        # last
        ("sub-ln 6 48 v1024", _encoder("sub-ln", 6, 48), "modules", 1024, "adamw"),
        ("modernbert 5 48 v512", _bert_like("modernbert", 5, 48, pad_token_id=0), "modules", 512, "adam"),
        # final
        ("post 6 48 v512", _encoder("post", 6, 48), "arrays", 512, "adamw"),
        ("roberta 5 48 bytes", _bert_like("roberta", 5, 48, **_ROBERTA), "arrays", 256, "adam"),
        ("peri 5 32 v1024", _encoder("peri", 5, 32), "arrays", 1024, "adamw"),
    ],
    held=6,
    fresh=2,
    last=2,
    final=3,
)


def _both(scheme: str, depth: int, width: int) -> Model:
    return Model(lambda vocab: ours("encoder-decoder", scheme, depth, width, vocab=vocab + 1), "ids")


def _seq2seq(model_type: str, sizes: Callable[[int], dict[str, int]]) -> Model:
    """A model of transformers, whose id for a hidden token begins the decoder's input."""

    def build(vocab: int) -> nn.Module:
        ids = {"vocab_size": vocab + 1, "decoder_start_token_id": vocab}
        return of_transformers("AutoModelForSeq2SeqLM", model_type, **ids, **sizes(vocab))

    return Model(build, "input_ids")


def _bart(model_type: str, depth: int, width: int, **options: Any) -> Model:
    each = {"layers": depth, "attention_heads": width // 16, "ffn_dim": 4 * width}
    both = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in each.items()}
    sizes = {"d_model": width, "max_position_embeddings": 128, "eos_token_id": 0, "bos_token_id": 0}
    return _seq2seq(model_type, lambda vocab: sizes | both | options | {"pad_token_id": vocab})


def _t5(model_type: str, depth: int, width: int) -> Model:
    sizes = {
        "d_model": width,
        "d_ff": 4 * width,
        "d_kv": 16,
        "num_heads": width // 16,
        "num_layers": depth,
        "num_decoder_layers": depth,
    }
    return _seq2seq(model_type, lambda _: sizes)


PAIRS = cases_of_text(
    "pairs",
    3000,
    pairs,
    [
        ("post 4 32 bytes", _both("post", 4, 32), "library", 256, "adamw"),
        ("pre 4 48 v512", _both("pre", 4, 48), "library", 512, "adamw"),
        ("deepnorm 6 32 bytes", _both("deepnorm", 6, 32), "library", 256, "adam"),
        ("t5 3 48 bytes", _t5("t5", 3, 48), "library", 256, "adamw"),
        ("bart 3 48 v512", _bart("bart", 3, 48), "library", 512, "adamw"),
        # held out
        ("post 6 32 v1024", _both("post", 6, 32), "help", 1024, "adam"),
        ("admin 5 32 bytes", _both("admin", 5, 32), "licences", 256, "adamw"),
        ("marian 5 32 bytes", _bart("marian", 5, 32), "help", 256, "adamw"),
        ("mt5 3 32 v1024", _t5("mt5", 3, 32), "licences", 1024, "adamw"),
        ("pegasus 4 48 bytes", _bart("pegasus", 4, 48), "licences", 256, "adam"),
        # fresh
        ("post 5 48 v512", _both("post", 5, 48), "modules", 512, "adamw"),
        ("bart 4 32 bytes", _bart("bart", 4, 32), "modules", 256, "adam"),
        ("pre 5 32 v1024", _both("pre", 5, 32), "modules", 1024, "adamw"),
        # fresh, and fixed when diversity had come to leave out what positions tell
        ("marian 4 48 v512", _bart("marian", 4, 48), "modules", 512, "adamw"),
        ("pegasus 3 32 v1024", _bart("pegasus", 3, 32), "modules", 1024, "adamw"),
        ("scaled marian 4 32 bytes", _bart("marian", 4, 32, scale_embedding=True), "modules", 256, "adam"),
        # last
        ("deepnorm 4 48 v512", _both("deepnorm", 4, 48), "modules", 512, "adamw"),
        ("bart 3 32 v512", _bart("bart", 3, 32), "modules", 512, "adamw"),
        # final
        ("post 4 48 v1024", _both("post", 4, 48), "arrays", 1024, "adam"),
        ("marian 3 48 v512", _bart("marian", 3, 48), "arrays", 512, "adamw"),
        ("admin 4 48 bytes", _both("admin", 4, 48), "arrays", 256, "adamw"),
        ("mt5 3 48 v512", _t5("mt5", 3, 48), "arrays", 512, "adam"),
    ],
    held=5,
    fresh=6,
    last=2,
    final=4,
)


def _vision(scheme: str, depth: int, width: int, side: int, patch: int) -> Callable[[], nn.Module]:
    return lambda: ours("vision", scheme, depth, width, image=side, patch=patch, channels=1)


def _vit(
    model_type: str, depth: int, width: int, side: int, patch: int, **options: Any
) -> Callable[[], nn.Module]:
    images = {"image_size": side, "patch_size": patch, "num_channels": 1, "num_labels": 10}
    shape = sizes(depth, width) | images | options
    return lambda: of_transformers("AutoModelForImageClassification", model_type, **shape)


VISION = cases_of(
    "vision",
    4000,
    [
        ("pre 6 32", _vision("pre", 6, 32, 8, 2), digits("plain", "images"), "adamw"),
        ("post 8 32", _vision("post", 8, 32, 8, 2), digits("plain", "images"), "adamw"),
        ("vit 6 48", _vit("vit", 6, 48, 8, 2), digits("plain", "pixel_values"), "adamw"),
        ("deepnorm 12 32", _vision("deepnorm", 12, 32, 8, 2), digits("plain", "images"), "adam"),
        ("swin-v2 8 32", _vision("swin-v2", 8, 32, 8, 2), digits("plain", "images"), "adamw"),
        ("layerscale 8 48", _vision("layerscale", 8, 48, 8, 2), digits("plain", "images"), "adamw"),
        # held out
        ("post 12 48", _vision("post", 12, 48, 16, 4), digits("noisy", "images"), "adam"),
        ("pre-no-final 6 48", _vision("pre-no-final", 6, 48, 16, 4), digits("noisy", "images"), "adamw"),
        ("vit-msn 6 32", _vit("vit_msn", 6, 32, 16, 4), digits("noisy", "pixel_values"), "adamw"),
        ("peri 9 32", _vision("peri", 9, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ("post 5 32", _vision("post", 5, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ("vit 10 48", _vit("vit", 10, 48, 16, 4), digits("noisy", "pixel_values"), "adam"),
        # fresh, and fixed before larger learning rates counted in the rule
        ("pre 10 48", _vision("pre", 10, 48, 16, 4), digits("noisy", "images"), "adam"),
        ("post 7 48", _vision("post", 7, 48, 16, 4), digits("noisy", "images"), "adamw"),
        ("deepnorm 8 48", _vision("deepnorm", 8, 48, 16, 4), digits("noisy", "images"), "adamw"),
        ("swin-v2 6 48", _vision("swin-v2", 6, 48, 16, 4), digits("noisy", "images"), "adam"),
        ("sub-ln 5 32", _vision("sub-ln", 5, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ("vit 4 32", _vit("vit", 4, 32, 16, 4), digits("noisy", "pixel_values"), "adamw"),
        # last
        ("mix-ln 6 32", _vision("mix-ln", 6, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ("post 10 32", _vision("post", 10, 32, 16, 4), digits("noisy", "images"), "adam"),
        ("vit 7 48", _vit("vit", 7, 48, 16, 4), digits("noisy", "pixel_values"), "adamw"),
        ("res-post 7 32", _vision("res-post", 7, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ("keel 6 48", _vision("keel", 6, 48, 16, 4), digits("noisy", "images"), "adam"),
        ("pre 4 32", _vision("pre", 4, 32, 16, 4), digits("noisy", "images"), "adamw"),
        # final
        ("pre-no-final 8 32", _vision("pre-no-final", 8, 32, 16, 4), digits("noisy", "images"), "adam"),
        ("post 6 48", _vision("post", 6, 48, 16, 4), digits("noisy", "images"), "adamw"),
        ("deepnorm 10 32", _vision("deepnorm", 10, 32, 16, 4), digits("noisy", "images"), "adamw"),
        ("vit-msn 5 48", _vit("vit_msn", 5, 48, 16, 4), digits("noisy", "pixel_values"), "adam"),
        ("peri 6 48", _vision("peri", 6, 48, 16, 4), digits("noisy", "images"), "adamw"),
    ],
    held=6,
    fresh=6,
    last=6,
    final=5,
)


def _series(scheme: str, depth: int, width: int, *, last: bool) -> Callable[[], nn.Module]:
    return lambda: BlockSeries(scheme, depth, width, last=last)


SERIES = cases_of(
    "series",
    5000,
    [
        ("plain post 6 32", lambda: PlainSeries(6, 32, norm_first=False), series("waves"), "adam"),
        ("plain pre 6 32", lambda: PlainSeries(6, 32, norm_first=True), series("waves"), "adamw"),
        ("post 12 32", _series("post", 12, 32, last=False), series("waves"), "adamw"),
        ("deepnorm 8 32", _series("deepnorm", 8, 32, last=False), series("waves"), "adamw"),
        ("peri 6 48", _series("peri", 6, 48, last=True), series("waves"), "adam"),
        # held out
        ("plain post 10 48", lambda: PlainSeries(10, 48, norm_first=False), series("chaos"), "adamw"),
        ("plain pre 9 48", lambda: PlainSeries(9, 48, norm_first=True), series("chaos"), "adam"),
        ("post 7 48", _series("post", 7, 48, last=False), series("chaos"), "adam"),
        ("res-post 6 32", _series("res-post", 6, 32, last=True), series("chaos"), "adamw"),
        ("keel 6 32", _series("keel", 6, 32, last=False), series("chaos"), "adamw"),
        # fresh
        ("deepnorm 6 48", _series("deepnorm", 6, 48, last=False), series("chaos"), "adamw"),
        ("peri 5 32", _series("peri", 5, 32, last=False), series("chaos"), "adam"),
        # last
        ("plain post 5 32", lambda: PlainSeries(5, 32, norm_first=False), series("chaos"), "adamw"),
        ("pre 8 48", _series("pre", 8, 48, last=True), series("chaos"), "adamw"),
        # final
        ("deepnorm 9 32", _series("deepnorm", 9, 32, last=True), series("chaos"), "adam"),
        ("plain post 8 48", lambda: PlainSeries(8, 48, norm_first=False), series("chaos"), "adamw"),
    ],
    held=5,
    fresh=2,
    last=2,
    final=2,
)

LONG = cases_of_text(
    "long",
    6000,
    tokens,
    [
        ("post 6 32", decoder("post", 6, 32), "library", 256, "adamw"),
        ("pre 6 32", decoder("pre", 6, 32), "library", 256, "adamw"),
        ("res-post 8 32", decoder("res-post", 8, 32), "library", 256, "adam"),
        ("deepnorm 10 32", decoder("deepnorm", 10, 32), "library", 256, "adamw"),
        # held out
        ("post 8 48", decoder("post", 8, 48), "help", 256, "adam"),
        ("plain pre 6 32", plain(6, 32, norm_first=True, tie=False), "licences", 256, "adamw"),
        ("keel 8 32", decoder("keel", 8, 32), "help", 256, "adamw"),
        ("gpt2 6 32", causal("gpt2", n_layer=6, n_embd=32, n_head=2), "licences", 256, "adamw"),
    ],
    held=4,
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
