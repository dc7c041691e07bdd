"""Builders of the regimes' cases: rows of a table → cases, and the models of their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.regimes.case import PARTS, STEPS, Case
from benchmarks.regimes.feeds import Feed
from benchmarks.regimes.models import PlainDecoder, of_transformers, ours

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


def cases_of(
    regime: str,
    seed: int,
    rows: Sequence[Built],
    held: int,
    steps: int = STEPS,
    fresh: int = 0,
    last: int = 0,
    final: int = 0,
) -> list[Case]:
    """Cases of a regime, the first with this seed; the numbers are those of rows of the later parts."""
    numbers = (len(rows) - held - fresh - last - final, held, fresh, last, final)
    parts = [part for part, number in zip(PARTS, numbers, strict=True) for _ in range(number)]
    return [
        Case(regime, name, build, feed, optimizer, seed + number, part, steps)
        for number, (part, (name, build, feed, optimizer)) in enumerate(zip(parts, rows, strict=True))
    ]


def cases_of_text(
    regime: str,
    seed: int,
    feed: Callable[[str, int, str], Feed],
    rows: Sequence[Row],
    held: int,
    steps: int = STEPS,
    fresh: int = 0,
    last: int = 0,
    final: int = 0,
) -> list[Case]:
    """Cases of a regime whose models read a text."""
    built = [
        (name, partial(model.build, vocabulary), feed(text, vocabulary, model.key), optimizer)
        for name, model, text, vocabulary, optimizer in rows
    ]
    return cases_of(regime, seed, built, held, steps, fresh, last, final)


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
