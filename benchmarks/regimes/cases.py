"""Ladders of the regimes; those with `held_out` were fixed before any forecast of them was made.

One ladder is a model on its data with an optimiser, at each learning rate of `RATES`.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.regimes import data
from benchmarks.regimes.models import BlockSeries, PlainDecoder, PlainSeries, of_transformers, ours
from normscope.subjects import Subject, make_subject
from normscope.subjects.subject import LOSS_INPUTS

RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
STEPS = 300
NATS, SHARE = 0.1, 0.1
"""A run trains if its last losses are this far below the loss without the input: in nats, or as a share."""


@dataclass(frozen=True)
class Feed:
    """Data of a case.

    Attributes:
        batches: seed → endless batches.
        baseline: the best loss of a model that ignores its input.
        loss: None is the model's own.
        is_regression: whether the margin is a share of the baseline.
    """

    batches: Callable[[int], Iterator[Any]]
    baseline: Callable[[], float]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    is_regression: bool = False


@dataclass(frozen=True)
class Case:
    """One ladder.

    Attributes:
        regime: its letter in `REGIMES`.
        name: unique in its regime.
        build: the model, from the global generator.
        feed: its data.
        optimizer, seed: of the first replica.
        held_out: whether the rule may not be set on it.
        steps: length of a run.
    """

    regime: str
    name: str
    build: Callable[[], nn.Module]
    feed: Feed
    optimizer: str
    seed: int
    held_out: bool
    steps: int = STEPS

    def subject(self, seed: int) -> Subject:
        """The model and its batches at a seed."""
        torch.manual_seed(seed)
        return make_subject(self.build(), _Again(self.feed.batches, seed), self.feed.loss, spec=self.name)

    def trains(self, last_loss: float, baseline: float) -> bool:
        """Whether a run with this mean of the last losses trains; not if it is nan."""
        margin = SHARE * baseline if self.feed.is_regression else NATS
        return last_loss <= baseline - margin


@dataclass(frozen=True)
class _Again:
    """Batches that start again at each iteration."""

    make: Callable[[int], Iterator[Any]]
    seed: int

    def __iter__(self) -> Iterator[Any]:
        return self.make(self.seed)


# Feeds


def tokens(text: str, vocabulary: int, key: str, size: int = 4, length: int = 64) -> Feed:
    """Windows of a text; `key` is the model's name for ids, "" for a model that takes them alone."""

    def batches(seed: int) -> Iterator[Any]:
        for ids in data.windows(data.ids_of(text, vocabulary), size, length, seed):
            if not key:
                yield ids
            elif key == "input_ids":
                yield {key: ids, "labels": ids}  # transformers shifts the labels
            else:
                last = torch.full((size, 1), data.IGNORED)
                yield {key: ids, "labels": torch.cat([ids[:, 1:], last], 1)}

    loss = None if key else data.next_token
    return Feed(batches, lambda: data.entropy_of(data.ids_of(text, vocabulary)), loss)


def masked(text: str, vocabulary: int, key: str, size: int = 8, length: int = 64) -> Feed:
    """Masked windows of a text; the model has one more id, for the mask."""

    def batches(seed: int) -> Iterator[Any]:
        for ids, labels in data.masked(data.ids_of(text, vocabulary), vocabulary, size, length, seed):
            yield {key: ids, "labels": labels}

    return Feed(batches, lambda: data.entropy_of(data.ids_of(text, vocabulary)))


def pairs(text: str, vocabulary: int, keys: tuple[str, str], size: int = 4, length: int = 48) -> Feed:
    """Sources with hidden tokens, and the whole as targets."""

    def batches(seed: int) -> Iterator[Any]:
        for source, inputs, target in data.pairs(
            data.ids_of(text, vocabulary), vocabulary, size, length, seed
        ):
            yield {keys[0]: source, keys[1]: inputs, "labels": target}

    return Feed(batches, lambda: data.entropy_of(data.ids_of(text, vocabulary)))


def digits(kind: str, key: str, size: int = 32) -> Feed:
    """Images of digits and their classes."""

    def batches(seed: int) -> Iterator[Any]:
        return ({key: pixels, "labels": classes} for pixels, classes in data.images(kind, size, seed))

    return Feed(batches, lambda: data.entropy_of(data.digits(kind)[1].numpy()))


def series(kind: str, size: int = 8, length: int = 64) -> Feed:
    """Pieces of a series; the loss is the squared error of the next value, and the variance is 1."""

    def batches(seed: int) -> Iterator[Any]:
        return data.series(kind, size, length, seed)

    return Feed(_inputs_and_targets(batches), lambda: 1.0, data.squared, is_regression=True)


def _inputs_and_targets(batches: Callable[[int], Iterator[Any]]) -> Callable[[int], Iterator[Any]]:
    def named(seed: int) -> Iterator[Any]:
        return ({"values": values, LOSS_INPUTS: (targets,)} for values, targets in batches(seed))

    return named


# Ladders


def _cases(regime: str, rows: list[tuple[str, Callable[[], nn.Module], Feed, str]], held: int) -> list[Case]:
    """Cases of a regime; the last `held` rows are held out."""
    first = {"tokens": 1000, "masked": 2000, "pairs": 3000, "vision": 4000, "series": 5000, "long": 6000}
    numbered = enumerate(rows, first[regime])
    return [
        Case(
            regime,
            name,
            build,
            feed,
            optimizer,
            seed,
            seed - first[regime] >= len(rows) - held,
            3000 if regime == "long" else STEPS,
        )
        for seed, (name, build, feed, optimizer) in numbered
    ]


def _decoder(scheme: str, depth: int, width: int, vocab: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: ours("decoder", scheme, depth, width, vocab=vocab, **options)


def _plain(vocab: int, depth: int, width: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: PlainDecoder(vocab, depth, width, **options)


def _causal(model_type: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: of_transformers("AutoModelForCausalLM", model_type, **options)


def _llama(depth: int, width: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "vocab_size": vocab,
    }


TOKENS = _cases(
    "tokens",
    [
        (
            "post 8 32 v512 tied",
            _decoder("post", 8, 32, 512, tie=True),
            tokens("library", 512, "ids"),
            "adamw",
        ),
        ("pre 6 48 v2048", _decoder("pre", 6, 48, 2048), tokens("library", 2048, "ids"), "adamw"),
        (
            "deepnorm 10 32 v2048 tied",
            _decoder("deepnorm", 10, 32, 2048, tie=True),
            tokens("library", 2048, "ids"),
            "adam",
        ),
        (
            "plain post 6 48 v512",
            _plain(512, 6, 48, norm_first=False, tie=False),
            tokens("library", 512, ""),
            "adam",
        ),
        (
            "peri 6 32 v8192 tied",
            _decoder("peri", 6, 32, 8192, tie=True),
            tokens("library", 8192, "ids"),
            "adamw",
        ),
        (
            "gpt2 6 48 v2048",
            _causal("gpt2", n_layer=6, n_embd=48, n_head=3, vocab_size=2048),
            tokens("library", 2048, "input_ids"),
            "adamw",
        ),
        ("post 5 48 v8192", _decoder("post", 5, 48, 8192), tokens("library", 8192, "ids"), "adamw"),
        (
            "llama 5 48 v512",
            _causal("llama", **_llama(5, 48, 512)),
            tokens("library", 512, "input_ids"),
            "adamw",
        ),
        ("res-post 8 32 v2048", _decoder("res-post", 8, 32, 2048), tokens("library", 2048, "ids"), "adam"),
        (
            "plain pre 4 48 v32000 tied",
            _plain(32000, 4, 48, norm_first=True, tie=True),
            tokens("library", 32000, ""),
            "adamw",
        ),
        # held out
        ("post 7 48 v1024", _decoder("post", 7, 48, 1024), tokens("help", 1024, "ids"), "adamw"),
        (
            "keel 6 48 v4096 tied",
            _decoder("keel", 6, 48, 4096, tie=True),
            tokens("licences", 4096, "ids"),
            "adamw",
        ),
        (
            "plain post 9 32 v1024 tied",
            _plain(1024, 9, 32, norm_first=False, tie=True),
            tokens("licences", 1024, ""),
            "adam",
        ),
        (
            "qwen2 5 64 v4096",
            _causal("qwen2", **_llama(5, 64, 4096)),
            tokens("help", 4096, "input_ids"),
            "adamw",
        ),
        ("deepnorm 14 32 v1024", _decoder("deepnorm", 14, 32, 1024), tokens("help", 1024, "ids"), "adamw"),
        (
            "gpt-neox 6 32 v16000",
            _causal(
                "gpt_neox",
                num_hidden_layers=6,
                hidden_size=32,
                num_attention_heads=2,
                intermediate_size=128,
                vocab_size=16000,
            ),
            tokens("help", 16000, "input_ids"),
            "adamw",
        ),
        (
            "pre-no-final 8 48 v1024",
            _decoder("pre-no-final", 8, 48, 1024),
            tokens("licences", 1024, "ids"),
            "adam",
        ),
        ("mix-ln 8 32 v4096", _decoder("mix-ln", 8, 32, 4096), tokens("help", 4096, "ids"), "adamw"),
        (
            "plain pre 7 64 v4096",
            _plain(4096, 7, 64, norm_first=True, tie=False),
            tokens("licences", 4096, ""),
            "adam",
        ),
        (
            "opt post 6 48 v1024",
            _causal(
                "opt",
                num_hidden_layers=6,
                hidden_size=48,
                word_embed_proj_dim=48,
                ffn_dim=192,
                num_attention_heads=3,
                vocab_size=1024,
                do_layer_norm_before=False,
            ),
            tokens("licences", 1024, "input_ids"),
            "adamw",
        ),
    ],
    held=10,
)


def _encoder(scheme: str, depth: int, width: int, vocab: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: ours("encoder", scheme, depth, width, vocab=vocab + 1, **options)


def _bert_like(
    model_type: str, depth: int, width: int, vocab: int, **options: Any
) -> Callable[[], nn.Module]:
    sizes = {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 16,
        "vocab_size": vocab + 1,
    }
    return lambda: of_transformers("AutoModelForMaskedLM", model_type, **(sizes | options))


MASKED = _cases(
    "masked",
    [
        ("post 6 32 bytes", _encoder("post", 6, 32, 256), masked("library", 256, "ids"), "adamw"),
        ("pre 8 32 v1024", _encoder("pre", 8, 32, 1024), masked("library", 1024, "ids"), "adamw"),
        ("bert 5 48 v1024", _bert_like("bert", 5, 48, 1024), masked("library", 1024, "input_ids"), "adamw"),
        ("deepnorm 10 32 bytes", _encoder("deepnorm", 10, 32, 256), masked("library", 256, "ids"), "adam"),
        (
            "roberta 8 32 bytes",
            _bert_like("roberta", 8, 32, 256, max_position_embeddings=400, pad_token_id=256),
            masked("library", 256, "input_ids"),
            "adamw",
        ),
        ("peri 6 48 v1024", _encoder("peri", 6, 48, 1024), masked("library", 1024, "ids"), "adam"),
        # held out
        ("post 9 48 bytes", _encoder("post", 9, 48, 256), masked("help", 256, "ids"), "adam"),
        ("bert 8 32 bytes", _bert_like("bert", 8, 32, 256), masked("licences", 256, "input_ids"), "adamw"),
        ("res-post 7 32 v512", _encoder("res-post", 7, 32, 512), masked("help", 512, "ids"), "adamw"),
        (
            "modernbert 6 48 v512",
            _bert_like("modernbert", 6, 48, 512, pad_token_id=0),
            masked("licences", 512, "input_ids"),
            "adamw",
        ),
        ("sub-ln 8 48 v512", _encoder("sub-ln", 8, 48, 512), masked("licences", 512, "ids"), "adamw"),
        (
            "electra 6 48 v2048",
            _bert_like("electra", 6, 48, 2048, embedding_size=48),
            masked("help", 2048, "input_ids"),
            "adam",
        ),
    ],
    held=6,
)


def _both(scheme: str, depth: int, width: int, vocab: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: ours("encoder-decoder", scheme, depth, width, vocab=vocab + 1, **options)


def _bart(model_type: str, depth: int, width: int, vocab: int, **options: Any) -> Callable[[], nn.Module]:
    both = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {
            "layers": depth,
            "attention_heads": width // 16,
            "ffn_dim": 4 * width,
        }.items()
    }
    ids = {"pad_token_id": vocab, "decoder_start_token_id": vocab, "eos_token_id": 0, "bos_token_id": 0}
    sizes = {"d_model": width, "vocab_size": vocab + 1, "max_position_embeddings": 128} | both | ids
    return lambda: of_transformers("AutoModelForSeq2SeqLM", model_type, **(sizes | options))


def _t5(model_type: str, depth: int, width: int, vocab: int) -> Callable[[], nn.Module]:
    sizes = {
        "d_model": width,
        "d_ff": 4 * width,
        "d_kv": 16,
        "num_heads": width // 16,
        "num_layers": depth,
        "num_decoder_layers": depth,
        "vocab_size": vocab + 1,
        "decoder_start_token_id": vocab,
    }
    return lambda: of_transformers("AutoModelForSeq2SeqLM", model_type, **sizes)


_OURS, _HF = ("ids", "decoder_ids"), ("input_ids", "decoder_input_ids")
PAIRS = _cases(
    "pairs",
    [
        ("post 4 32 bytes", _both("post", 4, 32, 256), pairs("library", 256, _OURS), "adamw"),
        ("pre 4 48 v512", _both("pre", 4, 48, 512), pairs("library", 512, _OURS), "adamw"),
        ("deepnorm 6 32 bytes", _both("deepnorm", 6, 32, 256), pairs("library", 256, _OURS), "adam"),
        ("t5 3 48 bytes", _t5("t5", 3, 48, 256), pairs("library", 256, _HF), "adamw"),
        ("bart 3 48 v512", _bart("bart", 3, 48, 512), pairs("library", 512, _HF), "adamw"),
        # held out
        ("post 6 32 v1024", _both("post", 6, 32, 1024), pairs("help", 1024, _OURS), "adam"),
        ("admin 5 32 bytes", _both("admin", 5, 32, 256), pairs("licences", 256, _OURS), "adamw"),
        ("marian 5 32 bytes", _bart("marian", 5, 32, 256), pairs("help", 256, _HF), "adamw"),
        ("mt5 3 32 v1024", _t5("mt5", 3, 32, 1024), pairs("licences", 1024, _HF), "adamw"),
        ("pegasus 4 48 bytes", _bart("pegasus", 4, 48, 256), pairs("licences", 256, _HF), "adam"),
    ],
    held=5,
)


def _vision(scheme: str, depth: int, width: int, side: int, patch: int) -> Callable[[], nn.Module]:
    return lambda: ours("vision", scheme, depth, width, image=side, patch=patch, channels=1)


def _vit(
    model_type: str, depth: int, width: int, side: int, patch: int, **options: Any
) -> Callable[[], nn.Module]:
    sizes = {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 16,
        "image_size": side,
        "patch_size": patch,
        "num_channels": 1,
        "num_labels": 10,
    }
    return lambda: of_transformers("AutoModelForImageClassification", model_type, **(sizes | options))


VISION = _cases(
    "vision",
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

LONG = _cases(
    "long",
    [
        ("post 6 32", _decoder("post", 6, 32, 256), tokens("library", 256, "ids"), "adamw"),
        ("pre 6 32", _decoder("pre", 6, 32, 256), tokens("library", 256, "ids"), "adamw"),
        ("res-post 8 32", _decoder("res-post", 8, 32, 256), tokens("library", 256, "ids"), "adam"),
        ("deepnorm 10 32", _decoder("deepnorm", 10, 32, 256), tokens("library", 256, "ids"), "adamw"),
        # held out
        ("post 8 48", _decoder("post", 8, 48, 256), tokens("help", 256, "ids"), "adam"),
        (
            "plain pre 6 32",
            _plain(256, 6, 32, norm_first=True, tie=False),
            tokens("licences", 256, ""),
            "adamw",
        ),
        ("keel 8 32", _decoder("keel", 8, 32, 256), tokens("help", 256, "ids"), "adamw"),
        (
            "gpt2 6 32",
            _causal("gpt2", n_layer=6, n_embd=32, n_head=2, vocab_size=256),
            tokens("licences", 256, "input_ids"),
            "adamw",
        ),
    ],
    held=4,
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
