"""Pairs of a model and its refactoring or port, in the styles of public code; nothing may be reported.

The weights of a pair are "held", from a file that both sides convert, or "fresh", drawn by one law.
"""

from collections.abc import Iterator

from benchmarks.diff.plants import Case
from benchmarks.diff.third import recipes
from benchmarks.diff.third.base import Family, same
from benchmarks.diff.third.families import (
    BERT,
    CHAT,
    CONVOLUTION,
    FAMILIES,
    GEMMA,
    GPT,
    LLAMA,
    MIXTURE,
    NEOX,
    OLMO,
    QWEN,
    T5_ENCODER,
    TRANSLATOR,
    VIT,
)

MISTAKEN = (
    "nanoGPT of square matrices untransposed",
    "llama2.c of unturned weights",
    "plain gains that were not raised",
)
"""Styles whose conversion is wrong."""
BETWEEN: tuple[tuple[Family, str, str], ...] = (
    (GPT, "minGPT", "Flax"),
    (GPT, "picoGPT", "Megatron"),
    (GPT, "CLIP", "fairseq"),
    (GPT, "annotated", "picoGPT"),
    (GPT, "Megatron", "CLIP"),
    (GPT, "nanoGPT", "annotated"),
    (GPT, "Flax", "nanoGPT in a dict"),
    (GPT, "nanoGPT by hooks", "fairseq"),
    (LLAMA, "llama2.c", "gpt-fast"),
    (LLAMA, "llama2.c", "course"),
    (LLAMA, "lit-gpt", "gpt-fast"),
    (LLAMA, "closures", "lit-gpt"),
    (LLAMA, "course", "closures"),
    (GEMMA, "gemma_pytorch", "plain gains"),
    (BERT, "torch layers", "lesson"),
    (VIT, "timm", "vit-pytorch"),
    (TRANSLATOR, "own layers", "time first"),
    (MIXTURE, "a loop over experts", "all experts at once"),
)
FRESH: tuple[tuple[Family, str, str], ...] = (
    *((GPT, "published", style) for style in ("minGPT", "nanoGPT", "annotated", "picoGPT", "fairseq")),
    *((GPT, "published", style) for style in ("Megatron", "Flax", "CLIP", "checkpointed nanoGPT")),
    (GPT, "minGPT", "picoGPT"),
    (GPT, "Flax", "Megatron"),
    (GPT, "CLIP", "annotated"),
    (GPT, "nanoGPT in a training module", "fairseq"),
    *((LLAMA, "published", style) for style in ("lit-gpt", "course", "closures")),
    (LLAMA, "lit-gpt", "course"),
    (LLAMA, "llama2.c", "gpt-fast"),
    (QWEN, "published", "from scratch"),
    (OLMO, "published", "OLMo"),
    (CHAT, "published", "nanochat"),
    (GEMMA, "published", "gemma_pytorch"),
    (NEOX, "published", "one Sequential"),
    (BERT, "published", "torch layers"),
    (BERT, "published", "lesson"),
    (VIT, "published", "timm"),
    (VIT, "timm", "vit-pytorch"),
    (T5_ENCODER, "published", "Mesh TensorFlow"),
    (TRANSLATOR, "published", "own layers"),
    (TRANSLATOR, "published", "time first"),
    (MIXTURE, "a loop over experts", "all experts at once"),
    (CONVOLUTION, "published", "shifts"),
)


def _cases() -> Iterator[Case]:
    for family in FAMILIES:
        for style in family.styles:
            if style not in MISTAKEN:
                yield same(family, "published", style)
    for family, a, b in BETWEEN:
        yield same(family, a, b)
    for family, a, b in FRESH:
        yield same(family, a, b, how="fresh")
    yield from recipes.same()


def cases() -> list[Case]:
    """All pairs."""
    return list(_cases())
