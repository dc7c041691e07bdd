"""Ladders of the regimes; those with `held_out` were fixed before any forecast of them was made.

One ladder is a model on its data with an optimiser, at each learning rate of `RATES`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.regimes.case import STEPS, Case
from benchmarks.regimes.feeds import Feed, digits, masked, pairs, series, tokens
from benchmarks.regimes.models import BlockSeries, PlainDecoder, PlainSeries, of_transformers, ours

Built = tuple[str, Callable[[], nn.Module], Feed, str]
"""Name, model, data and optimiser of a case."""


@dataclass(frozen=True)
class Model:
    """A model of tokens.

    Attributes:
        build: size of the text's vocabulary → model, from the global generator.
        key: its name for ids, "" if it takes them alone.
    """

    build: Callable[[int], nn.Module]
    key: str


Row = tuple[str, Model, str, int, str]
"""Name, model, text, size of the vocabulary and optimiser of a case."""


def _cases(regime: str, seed: int, rows: Sequence[Built], held: int, steps: int = STEPS) -> list[Case]:
    """Cases of a regime, the first with this seed; the last `held` rows are held out."""
    first_held = len(rows) - held
    return [
        Case(regime, name, build, feed, optimizer, seed + number, number >= first_held, steps)
        for number, (name, build, feed, optimizer) in enumerate(rows)
    ]


def _of_text(
    regime: str,
    seed: int,
    feed: Callable[[str, int, str], Feed],
    rows: Sequence[Row],
    held: int,
    steps: int = STEPS,
) -> list[Case]:
    """Cases of a regime whose models read a text."""
    built = [
        (name, partial(model.build, vocabulary), feed(text, vocabulary, model.key), optimizer)
        for name, model, text, vocabulary, optimizer in rows
    ]
    return _cases(regime, seed, built, held, steps)


def _sizes(depth: int, width: int, widening: int = 4) -> dict[str, int]:
    """Options of most configurations of transformers."""
    return {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "intermediate_size": widening * width,
        "num_attention_heads": width // 16,
    }


def _decoder(scheme: str, depth: int, width: int, **options: Any) -> Model:
    return Model(lambda vocab: ours("decoder", scheme, depth, width, vocab=vocab, **options), "ids")


def _plain(depth: int, width: int, **options: Any) -> Model:
    return Model(lambda vocab: PlainDecoder(vocab, depth, width, **options), "")


def _causal(model_type: str, **options: Any) -> Model:
    def build(vocab: int) -> nn.Module:
        return of_transformers("AutoModelForCausalLM", model_type, vocab_size=vocab, **options)

    return Model(build, "input_ids")


def _llama(depth: int, width: int) -> dict[str, int]:
    return _sizes(depth, width, 3) | {"num_key_value_heads": width // 16}


_OPT: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 192,
    "num_attention_heads": 3,
    "do_layer_norm_before": False,
}

TOKENS = _of_text(
    "tokens",
    1000,
    tokens,
    [
        ("post 8 32 v512 tied", _decoder("post", 8, 32, tie=True), "library", 512, "adamw"),
        ("pre 6 48 v2048", _decoder("pre", 6, 48), "library", 2048, "adamw"),
        ("deepnorm 10 32 v2048 tied", _decoder("deepnorm", 10, 32, tie=True), "library", 2048, "adam"),
        ("plain post 6 48 v512", _plain(6, 48, norm_first=False, tie=False), "library", 512, "adam"),
        ("peri 6 32 v8192 tied", _decoder("peri", 6, 32, tie=True), "library", 8192, "adamw"),
        ("gpt2 6 48 v2048", _causal("gpt2", n_layer=6, n_embd=48, n_head=3), "library", 2048, "adamw"),
        ("post 5 48 v8192", _decoder("post", 5, 48), "library", 8192, "adamw"),
        ("llama 5 48 v512", _causal("llama", **_llama(5, 48)), "library", 512, "adamw"),
        ("res-post 8 32 v2048", _decoder("res-post", 8, 32), "library", 2048, "adam"),
        ("plain pre 4 48 v32000 tied", _plain(4, 48, norm_first=True, tie=True), "library", 32000, "adamw"),
        # held out
        ("post 7 48 v1024", _decoder("post", 7, 48), "help", 1024, "adamw"),
        ("keel 6 48 v4096 tied", _decoder("keel", 6, 48, tie=True), "licences", 4096, "adamw"),
        ("plain post 9 32 v1024 tied", _plain(9, 32, norm_first=False, tie=True), "licences", 1024, "adam"),
        ("qwen2 5 64 v4096", _causal("qwen2", **_llama(5, 64)), "help", 4096, "adamw"),
        ("deepnorm 14 32 v1024", _decoder("deepnorm", 14, 32), "help", 1024, "adamw"),
        ("gpt-neox 6 32 v16000", _causal("gpt_neox", **_sizes(6, 32)), "help", 16000, "adamw"),
        ("pre-no-final 8 48 v1024", _decoder("pre-no-final", 8, 48), "licences", 1024, "adam"),
        ("mix-ln 8 32 v4096", _decoder("mix-ln", 8, 32), "help", 4096, "adamw"),
        ("plain pre 7 64 v4096", _plain(7, 64, norm_first=True, tie=False), "licences", 4096, "adam"),
        ("opt post 6 48 v1024", _causal("opt", **_OPT), "licences", 1024, "adamw"),
    ],
    held=10,
)


def _encoder(scheme: str, depth: int, width: int) -> Model:
    return Model(lambda vocab: ours("encoder", scheme, depth, width, vocab=vocab + 1), "ids")


def _bert_like(model_type: str, depth: int, width: int, **options: Any) -> Model:
    def build(vocab: int) -> nn.Module:
        sizes = _sizes(depth, width) | {"vocab_size": vocab + 1} | options
        return of_transformers("AutoModelForMaskedLM", model_type, **sizes)

    return Model(build, "input_ids")


_ROBERTA = {"max_position_embeddings": 400, "pad_token_id": 256}

MASKED = _of_text(
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
    ],
    held=6,
)


def _both(scheme: str, depth: int, width: int) -> Model:
    return Model(lambda vocab: ours("encoder-decoder", scheme, depth, width, vocab=vocab + 1), "ids")


def _seq2seq(model_type: str, sizes: Callable[[int], dict[str, int]]) -> Model:
    """A model of transformers, whose id for a hidden token begins the decoder's input."""

    def build(vocab: int) -> nn.Module:
        ids = {"vocab_size": vocab + 1, "decoder_start_token_id": vocab}
        return of_transformers("AutoModelForSeq2SeqLM", model_type, **ids, **sizes(vocab))

    return Model(build, "input_ids")


def _bart(model_type: str, depth: int, width: int) -> Model:
    each = {"layers": depth, "attention_heads": width // 16, "ffn_dim": 4 * width}
    both = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in each.items()}
    sizes = {"d_model": width, "max_position_embeddings": 128, "eos_token_id": 0, "bos_token_id": 0} | both
    return _seq2seq(model_type, lambda vocab: sizes | {"pad_token_id": vocab})


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


PAIRS = _of_text(
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
    ],
    held=5,
)


def _vision(scheme: str, depth: int, width: int, side: int, patch: int) -> Callable[[], nn.Module]:
    return lambda: ours("vision", scheme, depth, width, image=side, patch=patch, channels=1)


def _vit(
    model_type: str, depth: int, width: int, side: int, patch: int, **options: Any
) -> Callable[[], nn.Module]:
    images = {"image_size": side, "patch_size": patch, "num_channels": 1, "num_labels": 10}
    sizes = _sizes(depth, width) | images | options
    return lambda: of_transformers("AutoModelForImageClassification", model_type, **sizes)


VISION = _cases(
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
    ],
    held=6,
)


def _series(scheme: str, depth: int, width: int, *, last: bool) -> Callable[[], nn.Module]:
    return lambda: BlockSeries(scheme, depth, width, last=last)


SERIES = _cases(
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
    ],
    held=5,
)

LONG = _of_text(
    "long",
    6000,
    tokens,
    [
        ("post 6 32", _decoder("post", 6, 32), "library", 256, "adamw"),
        ("pre 6 32", _decoder("pre", 6, 32), "library", 256, "adamw"),
        ("res-post 8 32", _decoder("res-post", 8, 32), "library", 256, "adam"),
        ("deepnorm 10 32", _decoder("deepnorm", 10, 32), "library", 256, "adamw"),
        # held out
        ("post 8 48", _decoder("post", 8, 48), "help", 256, "adam"),
        ("plain pre 6 32", _plain(6, 32, norm_first=True, tie=False), "licences", 256, "adamw"),
        ("keel 8 32", _decoder("keel", 8, 32), "help", 256, "adamw"),
        ("gpt2 6 32", _causal("gpt2", n_layer=6, n_embd=32, n_head=2), "licences", 256, "adamw"),
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
}
CASES = tuple(itertools.chain.from_iterable(REGIMES.values()))
