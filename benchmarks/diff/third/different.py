"""Planted differences in the styles of public code: each pair is a refactoring with a mistake of a port."""

from collections.abc import Iterator

from benchmarks.diff.plants import Case
from benchmarks.diff.third import recipes
from benchmarks.diff.third.base import Family, planted
from benchmarks.diff.third.families import (
    BERT,
    CHAT,
    CONVOLUTION,
    GEMMA,
    GPT,
    LLAMA,
    NEOX,
    OLMO,
    QWEN,
    T5_ENCODER,
    TRANSLATOR,
    VIT,
)

Row = tuple[str, str, str, str, str]
"""A, B, the mistake in B, its kind and its place."""
ATTENTION, MLP, FIRST, LAST = "all attention", "all mlp", "first", "last"
ALL = "all"
NANO = "nanoGPT"
OF_GPT: tuple[Row, ...] = (
    (NANO, "minGPT", "bias dropped", "bias", ATTENTION),
    ("Flax", "minGPT", "mask off by one", "causal mask", ATTENTION),
    ("published", "minGPT", "k before q", "order of q, k, v", ATTENTION),
    ("picoGPT", "minGPT", "scale of the width", "attention scale", ATTENTION),
    ("annotated", "minGPT", "residual of the normed", "residual", ATTENTION),
    ("picoGPT", "minGPT", "positions from 1", "positions", FIRST),
    ("fairseq", "minGPT", "no final norm", "final norm", LAST),
    ("minGPT", NANO, "not causal", "causal mask", ATTENTION),
    ("Megatron", NANO, "heads not moved back", "order of heads", ATTENTION),
    ("Flax", NANO, "gelu by erf", "activation", MLP),
    ("picoGPT", NANO, "gelu by erf in layer 2", "activation", "mlp 2"),
    ("minGPT", NANO, "dropout always on", "dropout", MLP),
    ("published", NANO, "post-norm", "placement", ALL),
    ("picoGPT", NANO, "wrong residual", "residual", MLP),
    ("CLIP", NANO, "wrong residual in layer 1", "residual", "mlp 1"),
    ("CLIP", NANO, "eps", "ε", "branches"),
    ("fairseq", NANO, "scaled embedding", "embedding scale", FIRST),
    ("CLIP", "annotated", "rms", "norm kind", ALL),
    ("Megatron", "annotated", "relu", "activation", MLP),
    (NANO, "annotated", "bias of the head", "head bias", LAST),
    (NANO, "picoGPT", "heads backwards", "order of heads", ATTENTION),
    ("annotated", "picoGPT", "parallel", "parallel", "branches"),
    ("CLIP", "picoGPT", "no positions", "positions missing", FIRST),
    ("minGPT", "fairseq", "no scale", "attention scale", ATTENTION),
    ("Flax", "fairseq", "sees the next", "causal mask", ATTENTION),
    ("minGPT", "fairseq", "quick gelu", "activation", MLP),
    (NANO, "fairseq", "halved", "hidden scale", MLP),
    ("published", "fairseq", "cap on the logits", "output cap", LAST),
    (NANO, "Megatron", "interleaving forgotten", "order of q, k, v", ATTENTION),
    ("published", "Megatron", "bias of dense forgotten", "bias", ATTENTION),
    ("published", "Flax", "eps of Flax", "ε", "branches"),
    ("picoGPT", "Flax", "norm of the feed-forward missing", "placement", MLP),
    (NANO, "CLIP", "silu", "activation", MLP),
    ("Megatron", "CLIP", "scale of the head", "head scale", LAST),
    ("published", "nanoGPT of square matrices untransposed", "", "transposed weights", ATTENTION),
)
OF_LLAMA: tuple[Row, ...] = (
    ("lit-gpt", "llama2.c", "groups tiled", "groups of heads", ATTENTION),
    ("course", "llama2.c", "keys not rotated", "no rotation", ATTENTION),
    ("lit-gpt", "llama2.c", "w1 and w3 changed over", "gate and up", MLP),
    ("gpt-fast", "llama2.c", "eps of the first code", "ε", "branches"),
    ("closures", "llama2.c", "base of LLaMA 3", "rotary base", ATTENTION),
    ("published", "llama2.c of unturned weights", "", "rotary layout of the checkpoint", ATTENTION),
    ("course", "lit-gpt", "scale twice", "attention scale", ATTENTION),
    ("published", "lit-gpt", "scale of the width in layer 1", "attention scale", "attention 1"),
    ("published", "lit-gpt", "gelu", "activation", MLP),
    ("gpt-fast", "lit-gpt", "unit offset", "gain + 1", "branches"),
    ("llama2.c", "lit-gpt", "parallel residual", "parallel", "branches"),
    ("closures", "lit-gpt", "last norm left out", "final norm", LAST),
    ("course", "lit-gpt", "eps", "ε", ALL),
    ("lit-gpt", "gpt-fast", "window", "window", ATTENTION),
    ("llama2.c", "gpt-fast", "halves of w13", "gate and up", MLP),
    ("published", "course", "layer norm", "norm kind", ALL),
    ("lit-gpt", "course", "base of 1000", "rotary base", ATTENTION),
    ("gpt-fast", "course", "own key hidden", "causal mask", ATTENTION),
    ("closures", "course", "gate without its factor", "activation", MLP),
    ("published", "course", "norm behind the branch", "placement", "branches"),
    ("llama2.c", "course", "norm behind the branch in layer 2", "placement", "attention 2, mlp 2"),
)
OTHERS: tuple[tuple[Family, Row], ...] = (
    (QWEN, ("published", "from scratch", "no QK-norm", "QK-norm", ATTENTION)),
    (QWEN, ("published", "from scratch", "eps of the QK-norm", "ε", ATTENTION)),
    (QWEN, ("published", "from scratch", "rotated, then normed", "norm and rotation", ATTENTION)),
    (QWEN, ("published", "from scratch", "scaled branch", "branch scale", MLP)),
    (QWEN, ("published", "from scratch", "base of others", "rotary base", ATTENTION)),
    (OLMO, ("published", "OLMo", "QK-norm by head", "QK-norm", ATTENTION)),
    (OLMO, ("published", "OLMo", "norms before the branches", "placement", "branches")),
    (CHAT, ("published", "nanochat", "relu not squared", "activation", MLP)),
    (CHAT, ("published", "nanochat", "no norm of the embedding", "embedding norm", FIRST)),
    (CHAT, ("published", "nanochat", "no cap", "output cap", LAST)),
    (CHAT, ("published", "nanochat", "no QK-norm", "QK-norm", ATTENTION)),
    (GEMMA, ("published", "gemma_pytorch", "window too long", "window", "attention 0")),
    (GEMMA, ("published", "gemma_pytorch", "no window", "window", "attention 0")),
    (GEMMA, ("plain gains", "gemma_pytorch", "no cap on the scores", "logit cap", ATTENTION)),
    (GEMMA, ("published", "plain gains", "gelu by erf", "activation", MLP)),
    (GEMMA, ("published", "plain gains", "norm behind attention missing", "placement", ATTENTION)),
    (GEMMA, ("published", "plain gains that were not raised", "", "gain of the checkpoint", ALL)),
    (GEMMA, ("published", "plain gains", "embedding not scaled", "embedding scale", FIRST)),
    (GEMMA, ("published", "gemma_pytorch", "no cap at the end", "output cap", LAST)),
    (NEOX, ("published", "one Sequential", "all channels rotated", "rotary width", ATTENTION)),
    (NEOX, ("published", "one Sequential", "neighbours rotated", "rotary layout", ATTENTION)),
    (NEOX, ("published", "one Sequential", "one branch after the other", "parallel", "branches")),
    (BERT, ("published", "torch layers", "relu", "activation", MLP)),
    (BERT, ("lesson", "torch layers", "eps of torch", "ε", "branches")),
    (BERT, ("published", "torch layers", "norm first", "placement", "branches")),
    (BERT, ("published", "torch layers", "no segments", "embedding part", FIRST)),
    (BERT, ("lesson", "torch layers", "no norm of the embedding", "embedding norm", FIRST)),
    (BERT, ("published", "lesson", "no biases in attention", "bias", ATTENTION)),
    (BERT, ("torch layers", "lesson", "causal", "causal mask", ATTENTION)),
    (BERT, ("published", "lesson", "gelu by tanh", "activation", MLP)),
    (BERT, ("published", "lesson", "positions as data", "stop-gradient", FIRST)),
    (VIT, ("published", "timm", "eps of torch", "ε", ALL)),
    (VIT, ("vit-pytorch", "timm", "no bias of qkv", "bias", ATTENTION)),
    (VIT, ("vit-pytorch", "timm", "mean of patches", "pooling", LAST)),
    (VIT, ("timm", "vit-pytorch", "last patch", "pooling", LAST)),
    (T5_ENCODER, ("published", "Mesh TensorFlow", "layer norm", "norm kind", "branches")),
    (
        T5_ENCODER,
        ("published", "Mesh TensorFlow", "scaled by the width of a head", "attention scale", ATTENTION),
    ),
    (T5_ENCODER, ("published", "Mesh TensorFlow", "distance backwards", "position table", ATTENTION)),
    (
        T5_ENCODER,
        (
            "published",
            "Mesh TensorFlow",
            "table in the first layer alone",
            "position table",
            "attention 1",
        ),
    ),
    (TRANSLATOR, ("published", "own layers", "no scale", "attention scale", ATTENTION)),
    (TRANSLATOR, ("time first", "own layers", "gelu", "activation", MLP)),
    (TRANSLATOR, ("published", "own layers", "embedding not scaled", "embedding scale", FIRST)),
    (TRANSLATOR, ("time first", "own layers", "decoder not causal", "causal mask", ATTENTION)),
    (TRANSLATOR, ("own layers", "time first", "decoder norm first", "placement", "branches")),
    (CONVOLUTION, ("published", "shifts", "eps", "ε", ATTENTION)),
)
FRESH: tuple[tuple[Family, Row], ...] = (
    (GPT, ("CLIP", "minGPT", "untied", "tied head", "last, first")),
    (GPT, ("published", "minGPT", "no depth in the start", "init depth", ALL)),
    (GPT, (NANO, "minGPT", "table of 1", "init scale", FIRST)),
    (GPT, ("published", NANO, "biases of torch", "init zeros", ALL)),
    (GPT, (NANO, "Megatron", "start without depth", "init depth", ALL)),
    (LLAMA, ("lit-gpt", "llama2.c of unturned weights", "", "rotary layout", ATTENTION)),
    (LLAMA, ("course", "lit-gpt", "start by width", "init scale", ALL)),
    (LLAMA, ("llama2.c", "gpt-fast", "wo starts at zero", "init zeros", ATTENTION)),
)
Pair = tuple[Family, str, str, str, tuple[str, str], tuple[str, str]]
TWO: tuple[Pair, ...] = (
    (
        GPT,
        "fairseq",
        "nanoGPT of square matrices untransposed",
        "gelu by erf",
        ("transposed weights", ATTENTION),
        ("activation", MLP),
    ),
    (
        LLAMA,
        "lit-gpt",
        "llama2.c of unturned weights",
        "w1 and w3 changed over",
        ("rotary layout of the checkpoint", ATTENTION),
        ("gate and up", MLP),
    ),
    (
        GEMMA,
        "published",
        "plain gains that were not raised",
        "no cap at the end",
        ("gain of the checkpoint", ALL),
        ("output cap", LAST),
    ),
)


def _row(family: Family, row: Row, how: str = "held") -> Case:
    a, b, slip, kind, where = row
    return planted(family, a, b, slip, (kind, where), how=how)


def _cases() -> Iterator[Case]:
    for family, rows in ((GPT, OF_GPT), (LLAMA, OF_LLAMA)):
        yield from (_row(family, row) for row in rows)
    yield from (_row(family, row) for family, row in OTHERS)
    yield from (_row(family, row, "fresh") for family, row in FRESH)
    for family, a, b, slip, *plants in TWO:
        yield planted(family, a, b, slip, *plants)
    yield from recipes.planted()


def cases() -> list[Case]:
    """All pairs."""
    return list(_cases())
