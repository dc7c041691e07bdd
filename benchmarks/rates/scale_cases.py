"""Models at several widths, in the standard parametrisation and in μP.

Each model is trained around its best learning rate at every width. μP is that of `normscope.nn` (`init=mup`,
Yang et al. 2022, arXiv:2203.03466) with the smallest width as its base. Depths are those of docs/maps.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from benchmarks.regimes.case import Case
from benchmarks.regimes.feeds import Feed, tokens
from benchmarks.regimes.models import of_transformers, ours

BYTES = 256
BASE_WIDTH, BASE_DEPTH = 16, 3
WIDTHS = (16, 64, 32, 128)
"""Widths at `BASE_DEPTH`, in the order in which they are trained."""
GUESS = 4e-3
"""Learning rate near the best of each family at width 16 and depth 3."""


@dataclass(frozen=True)
class Family:
    """One model at any shape.

    Attributes:
        name: unique.
        part: "seen" if exponents are fitted on it, else "held-out".
        parametrisation: "standard" or "mup".
        build: depth and width → model, from the global generator.
        feed: its data.
    """

    name: str
    part: str
    parametrisation: str
    build: Callable[[int, int], nn.Module]
    feed: Feed

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Depth and width of each model."""
        for width in WIDTHS:
            yield BASE_DEPTH, width

    def case(self, depth: int, width: int) -> Case:
        """The model of a shape as a ladder."""
        name = f"{self.name} {depth} {width}"
        return Case("scale", name, partial(self.build, depth, width), self.feed, "adamw", 9500, self.part)

    def first_rate(self, width: int) -> float:
        """The middle of the first three learning rates, on a grid of factors of two."""
        return GUESS / (2 if width > 32 and self.parametrisation == "standard" else 1)


def _ours(scheme: str, init: str | None = None) -> Callable[[int, int], nn.Module]:
    def build(depth: int, width: int) -> nn.Module:
        return ours("decoder", scheme, depth, width, init=init, base_width=BASE_WIDTH)

    return build


def _gpt2(depth: int, width: int) -> nn.Module:
    sizes = {"n_layer": depth, "n_embd": width, "n_head": width // 16, "vocab_size": BYTES}
    return of_transformers("AutoModelForCausalLM", "gpt2", **sizes, n_positions=64)


def _llama(depth: int, width: int) -> nn.Module:
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "intermediate_size": 3 * width}
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 16}
    return of_transformers("AutoModelForCausalLM", "llama", **sizes, **heads, vocab_size=BYTES)


_HELP, _LICENCES = tokens("help", BYTES, "ids"), tokens("licences", BYTES, "ids")
_HF = tokens("licences", BYTES, "input_ids")

FAMILIES = (
    Family("pre", "seen", "standard", _ours("pre"), _HELP),
    Family("post", "seen", "standard", _ours("post"), _HELP),
    Family("pre mup", "seen", "mup", _ours("pre", "mup"), _HELP),
    Family("gpt2", "held-out", "standard", _gpt2, _HF),
    Family("deepnorm", "seen", "standard", _ours("deepnorm"), _HELP),
    Family("post mup", "seen", "mup", _ours("post", "mup"), _HELP),
    Family("llama", "held-out", "standard", _llama, _HF),
    Family("peri", "held-out", "standard", _ours("peri"), _LICENCES),
    Family("deepnorm mup", "held-out", "mup", _ours("deepnorm", "mup"), _LICENCES),
)
