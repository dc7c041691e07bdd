"""The set `same-fourth`: refactorings and ports in which nothing may be reported."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.diff.fourth import recipes
from benchmarks.diff.fourth.base import Family, Pair, Style
from benchmarks.diff.fourth.families import FAMILIES
from benchmarks.diff.fourth.places import ANY
from benchmarks.diff.fourth.plain import PLAIN_GPT, PLAIN_LLAMA
from benchmarks.diff.plants import Case

ACROSS = (
    ("GPT-2", "nanoGPT", "Megatron"),
    ("GPT-2", "Megatron", "Flax"),
    ("LLaMA", "Meta", "gpt-fast"),
    ("LLaMA", "course", "tutorial"),
    ("LLaMA", "gpt-fast", "lit-gpt"),
    ("Mistral", "gpt-fast", "Meta"),
    ("Qwen3", "lit-gpt", "tutorial"),
    ("BERT", "textbook", "nn.TransformerEncoder"),
    ("ViT", "timm", "vit-pytorch"),
)
"""Pairs of which neither side is the published code."""
BOTH_FRESH = (
    ("LLaMA", "tutorial", "lit-gpt"),
    ("LLaMA", "Meta", "tutorial"),
    ("LLaMA", "gpt-fast", "Meta"),
    ("Qwen3", "tutorial", "lit-gpt"),
    ("ViT", "timm", "vit-pytorch"),
)
"""Pairs of fresh models, both drawn by PyTorch's defaults."""
FROM_PUBLISHED = ("split projections", "fused layers in a Sequential", "other names and one-hot tables")
"""Refactorings that are also compared with the published code."""


def plain() -> dict[str, Family]:
    """Families with the plain refactorings as styles."""
    made = {}
    for name, table in (("GPT-2", PLAIN_GPT), ("LLaMA", PLAIN_LLAMA)):
        styles = {word: Style(make, carry, ANY) for word, (make, carry) in table.items()}
        made[name] = replace(FAMILIES[name], styles={**FAMILIES[name].styles, **styles})
    return made


def pairs() -> Iterator[Pair]:
    """The pairs of models."""
    for name, family in FAMILIES.items():
        first, *others = family.styles
        for number, other in enumerate(others):
            is_alone = number == 0 and name in ("GPT-2", "LLaMA", "Phi", "Gemma-2", "Pythia")
            yield Pair(name, family, first, other, is_alone=is_alone)
    for name, a, b in ACROSS:
        yield Pair(name, FAMILIES[name], a, b)
    for name, a, b in BOTH_FRESH:
        yield Pair(name, FAMILIES[name], a, b, is_fresh=True)
    families = plain()
    for name, first in (("GPT-2", "nanoGPT"), ("LLaMA", "Meta")):
        for word in PLAIN_GPT if name == "GPT-2" else PLAIN_LLAMA:
            if word == "wrapper with a loss":
                yield Pair(name, families[name], "transformers", word)
                continue
            yield Pair(name, families[name], first, word, is_fresh=True, is_alone=word == "hooks")
            if word in (
                "split projections",
                "fused layers in a Sequential",
                "other names and one-hot tables",
            ):
                yield Pair(name, families[name], "transformers", word)


def cases() -> list[Case]:
    """The pairs of models and of recipes, for `diff.runs`."""
    return [*(pair.case() for pair in pairs()), *recipes.same()]
