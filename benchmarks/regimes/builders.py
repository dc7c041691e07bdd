"""Builders of the regimes' cases: rows of a table → cases, and the models of their rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.regimes.case import STEPS, Case
from benchmarks.regimes.feeds import Feed
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


def cases_of(regime: str, seed: int, parts: Mapping[str, Sequence[Built]], steps: int = STEPS) -> list[Case]:
    """Cases of a regime, by part, the first with this seed."""
    rows = [(part, row) for part, of_part in parts.items() for row in of_part]
    return [
        Case(regime, name, build, feed, optimizer, seed + number, part, steps)
        for number, (part, (name, build, feed, optimizer)) in enumerate(rows)
    ]


def cases_of_text(
    regime: str,
    seed: int,
    feed: Callable[[str, int, str], Feed],
    parts: Mapping[str, Sequence[Row]],
    steps: int = STEPS,
) -> list[Case]:
    """Cases of a regime whose models read a text."""

    def built(row: Row) -> Built:
        name, model, text, vocabulary, optimizer = row
        return name, partial(model.build, vocabulary), feed(text, vocabulary, model.key), optimizer

    return cases_of(regime, seed, {part: list(map(built, rows)) for part, rows in parts.items()}, steps)


def sizes(depth: int, width: int, widening: int = 4) -> dict[str, int]:
    """Options of most configurations of transformers."""
    return {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "intermediate_size": widening * width,
        "num_attention_heads": width // 16,
    }


def decoder(scheme: str, depth: int, width: int, **options: Any) -> Model:
    return Model(lambda vocab: ours("decoder", scheme, depth, width, vocab=vocab, **options), "ids")


def plain(depth: int, width: int, **options: Any) -> Model:
    return Model(lambda vocab: PlainDecoder(vocab, depth, width, **options), "")


def causal(model_type: str, **options: Any) -> Model:
    def build(vocab: int) -> nn.Module:
        return of_transformers("AutoModelForCausalLM", model_type, vocab_size=vocab, **options)

    return Model(build, "input_ids")


def opt(depth: int, width: int) -> dict[str, int | bool]:
    """Options of a Post-LN OPT."""
    return {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_attention_heads": width // 16,
        "do_layer_norm_before": False,
    }


def llama(depth: int, width: int) -> dict[str, int]:
    return sizes(depth, width, 3) | {"num_key_value_heads": width // 16}


def encoder(scheme: str, depth: int, width: int) -> Model:
    return Model(lambda vocab: ours("encoder", scheme, depth, width, vocab=vocab + 1), "ids")


def bert_like(model_type: str, depth: int, width: int, **options: Any) -> Model:
    def build(vocab: int) -> nn.Module:
        shape = sizes(depth, width) | {"vocab_size": vocab + 1} | options
        return of_transformers("AutoModelForMaskedLM", model_type, **shape)

    return Model(build, "input_ids")


def encoder_decoder(scheme: str, depth: int, width: int) -> Model:
    return Model(lambda vocab: ours("encoder-decoder", scheme, depth, width, vocab=vocab + 1), "ids")


def _seq2seq(model_type: str, shape: Callable[[int], dict[str, int]]) -> Model:
    """A model of transformers, whose id for a hidden token begins the decoder's input."""

    def build(vocab: int) -> nn.Module:
        ids = {"vocab_size": vocab + 1, "decoder_start_token_id": vocab}
        return of_transformers("AutoModelForSeq2SeqLM", model_type, **ids, **shape(vocab))

    return Model(build, "input_ids")


def bart(model_type: str, depth: int, width: int, **options: Any) -> Model:
    each = {"layers": depth, "attention_heads": width // 16, "ffn_dim": 4 * width}
    both = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in each.items()}
    rest = {"d_model": width, "max_position_embeddings": 128, "eos_token_id": 0, "bos_token_id": 0}
    return _seq2seq(model_type, lambda vocab: rest | both | options | {"pad_token_id": vocab})


def t5(model_type: str, depth: int, width: int) -> Model:
    shape = {
        "d_model": width,
        "d_ff": 4 * width,
        "d_kv": 16,
        "num_heads": width // 16,
        "num_layers": depth,
        "num_decoder_layers": depth,
    }
    return _seq2seq(model_type, lambda _: shape)


def vision(scheme: str, depth: int, width: int, side: int, patch: int) -> Callable[[], nn.Module]:
    return lambda: ours("vision", scheme, depth, width, image=side, patch=patch, channels=1)


def vit(
    model_type: str, depth: int, width: int, side: int, patch: int, **options: Any
) -> Callable[[], nn.Module]:
    images = {"image_size": side, "patch_size": patch, "num_channels": 1, "num_labels": 10}
    shape = sizes(depth, width) | images | options
    return lambda: of_transformers("AutoModelForImageClassification", model_type, **shape)


def plain_series(depth: int, width: int, *, norm_first: bool) -> Callable[[], nn.Module]:
    return lambda: PlainSeries(depth, width, norm_first=norm_first)


def block_series(scheme: str, depth: int, width: int, *, last: bool) -> Callable[[], nn.Module]:
    return lambda: BlockSeries(scheme, depth, width, last=last)
