"""Pairs of a model and its refactoring or port, in many code styles; nothing may be reported.

A pair is `fresh`, both sides drawn by one law, or `held`, both with the weights of a file.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.diff.fresh.attention import Canon
from benchmarks.diff.fresh.planting import as_pairs
from benchmarks.diff.fresh.weights import canon_of
from benchmarks.diff.new.models import Model, Raw, Shared, Torch, Translator
from benchmarks.diff.new.parts import Spec, Style
from benchmarks.diff.new.published import MAKERS, published
from benchmarks.diff.plants import Case

SEED = 67
Make = Callable[[Spec], Any]

BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
LN: dict[str, Any] = {"norm": "ln", "norm_bias": True, "eps": 1e-5, "gated": False, "act": "gelu"}
GPT = Spec(44, 3, 4, 4, 11, 100, 133, table=0, tied=True, **BIASES, **LN)
LM = Spec(52, 3, 6, 2, 10, 84, 180, turned=10, eps=1e-5)
LEAN = replace(GPT, norm_bias=False, qkv_bias=False, o_bias=False, mlp_bias=False, tied=False, act="tanh")
PARALLEL = Spec(
    48, 4, 3, 3, 16, 90, 210, parallel=True, turned=8, norm="ln", eps=1e-5, gated=False, act="relu"
)
ENCODER = Spec(45, 2, 5, 5, 9, 75, 144, table=0, mask="none", place="post", emb_norm=True, **BIASES, **LN)
ENCODER = replace(ENCODER, final=False, head_bias=True)
READER = Spec(42, 3, 6, 3, 8, 66, 105, turned=8, mask="none", eps=1e-5)
CAPPED = Spec(40, 2, 4, 2, 12, 96, 122, turned=12, plus=1.0, emb=40**0.5, cap=20.0, tied=True, act="tanh")
LOCAL = Spec(56, 4, 4, 2, 14, 72, 167, turned=14, qk="head", window=9, eps=1e-5)
AFTER = Spec(38, 3, 4, 4, 10, 88, 98, turned=10, place="out", qk="late", eps=1e-5)
MULTIPLIED = Spec(50, 2, 5, 1, 12, 62, 154, turned=12, emb=5.0, branch=0.4, scale=0.05, logits=0.2, eps=1e-5)
BIASED = Spec(48, 2, 6, 2, 8, 80, 139, turned=8, qkv_bias=True, o_bias=True, eps=1e-5)
POST = replace(GPT, place="post", act="relu")
BOTH = Spec(40, 2, 4, 4, 10, 70, 113, table=0, **BIASES, **LN)


def style(**ways: Any) -> Make:
    """A model in a style."""
    return partial(Model, style=Style(**ways))


def into(canon: Canon, size: int) -> Canon:
    """Queries and keys of rotated halves for rotated neighbours."""
    return {k: as_pairs(v, size) if k.partition(".")[2] in ("q", "k") else v for k, v in canon.items()}


def turned(opt: Spec) -> Any:
    """A model that rotates neighbours, and turns the rows that it is given."""
    model = Model(replace(opt, pairs=True), Style("dict", proj="heads", rotary="complex", groups="einsum"))
    fill = model.fill
    model.fill = lambda canon: fill(into(canon, opt.size))  # type: ignore[method-assign]
    return model


def inside(**ways: Any) -> Make:
    """A model that another class calls."""
    return lambda opt: Shared(Model(opt, Style(**ways)))


TRIPLE: dict[str, Any] = {"proj": "triple", "scores": "einsum", "mask": "fill"}
ROWS: list[tuple[str, Spec, Make, Make]] = [
    ("biases by heads", GPT, style(), style(box="roles", proj="heads", scores="queries")),
    ("one tensor (3, H, K, D)", GPT, style(proj="fused"), style(box="dict", **TRIPLE, norm="moments")),
    ("kernels", GPT, style(box="sequential"), style(proj="kernel", ffn="kernel", norm="squares")),
    ("lists of parameters", GPT, style(ffn="sequence"), Raw),
    ("stacked parameters", GPT, style(proj="fused", ffn="fused"), partial(Raw, stacked=True)),
    ("parameters in lists and stacked", GPT, Raw, partial(Raw, stacked=True)),
    ("PyTorch's layers", GPT, style(proj="fused", head="functional"), Torch),
    ("PyTorch's layers, time first", GPT, Torch, style(time=True, proj="heads", scores="both")),
    ("PyTorch's layers and lists", GPT, partial(Torch, time=True), Raw),
    ("PyTorch's layers, norms after", POST, partial(Torch, time=True), style(box="flat", norm="functional")),
    ("norm and residual as modules", GPT, style(), style(box="wrapped", ffn="sequence", add="torch")),
    ("all modules in one list", LM, style(), style(box="flat", rotary="cached", norm="moments")),
    ("residuals in modules", LM, style(proj="fused"), style(box="wrapped", norm="length", add="method")),
    ("keys expanded", LM, style(groups="repeat"), style(groups="expand", rotary="complex", norm="squares")),
    ("PyTorch's groups of keys", LM, style(groups="gqa"), style(box="roles", groups="einsum", mask="where")),
    ("float mask", LM, style(mask="bool"), style(mask="float", proj="kernel", ffn="kernel")),
    ("mask in the scores", LM, style(), style(mask="float", scores="divided", norm="sum", ffn="fused")),
    ("time first, groups", LM, style(), style(time=True, groups="expand", proj="pair", add="inside")),
    ("neighbours rotated", LM, style(rotary="cached"), turned),
    ("checkpointed", LM, style(), style(saving=True, proj="pair", ffn="fused", rotary="cached")),
    ("called with parameters", LM, style(), style(direct=True, proj="fused", rotary="complex")),
    ("in a trainer", LM, style(box="dict"), inside(proj="pair", ffn="conv", add="torch")),
    ("convolutions", LM, style(ffn="fused"), style(box="sequential", ffn="conv", norm="functional")),
    ("drawn backwards", LM, style(), style(box="dict", proj="heads", head="einsum", norm="moments")),
    ("norms without bias", LEAN, style(), style(norm="functional", ffn="sequence", head="matmul")),
    (
        "norms without bias, by hand",
        LEAN,
        style(box="flat"),
        style(norm="moments", proj="triple", add="torch"),
    ),
    (
        "no bias, one-hot rows",
        LEAN,
        style(box="sequential"),
        style(embed="hot", proj="kernel", norm="squares"),
    ),
    ("parallel branches", PARALLEL, style(proj="fused"), style(box="dict", proj="heads", norm="moments")),
    (
        "parallel branches, time first",
        PARALLEL,
        style(),
        style(box="sequential", time=True, rotary="complex"),
    ),
    ("encoder", ENCODER, style(), style(box="roles", proj="heads", scores="both", norm="moments")),
    ("encoder, fused", ENCODER, style(proj="fused", ffn="sequence"), style(box="flat", time=True, **TRIPLE)),
    ("encoder in a trainer", ENCODER, style(box="dict"), inside(proj="kernel", ffn="kernel", dropout=True)),
    (
        "encoder with groups",
        READER,
        style(),
        style(groups="gqa", rotary="complex", norm="length", saving=True),
    ),
    (
        "encoder, rows (H, K, D)",
        READER,
        style(proj="pair"),
        style(box="wrapped", proj="heads", groups="einsum"),
    ),
    ("scale inside of the table", CAPPED, style(), style(embed="inside", head="functional", norm="moments")),
    ("gains plus one", CAPPED, style(norm="functional"), style(box="flat", norm="squares", proj="heads")),
    ("one-hot and scaled", CAPPED, style(embed="index"), style(embed="hot", head="einsum", groups="einsum")),
    (
        "window",
        LOCAL,
        style(mask="bool"),
        style(mask="where", scores="queries", norm="moments", rotary="cached"),
    ),
    ("window, norms of heads", LOCAL, style(), style(box="roles", mask="float", proj="heads", norm="length")),
    ("norms after branches", AFTER, style(), style(box="flat", proj="triple", norm="squares", ffn="fused")),
    (
        "norms after branches, dictionary",
        AFTER,
        style(ffn="conv"),
        style(box="dict", add="inside", time=True),
    ),
    ("multipliers", MULTIPLIED, style(), style(box="wrapped", groups="expand", scores="divided", norm="sum")),
    (
        "multipliers, one key head",
        MULTIPLIED,
        style(proj="pair"),
        style(proj="heads", embed="index", head="matmul"),
    ),
    ("grouped biases", BIASED, style(), style(proj="heads", groups="einsum", norm="length", dropout=True)),
    ("grouped biases, fused", BIASED, style(proj="fused"), style(box="roles", proj="kernel", add="torch")),
]
"""Options of both, A and B."""
HELD = {
    "one tensor (3, H, K, D)",
    "stacked parameters",
    "PyTorch's layers",
    "neighbours rotated",
    "float mask",
    "encoder, fused",
    "gains plus one",
    "window",
    "norms after branches",
    "grouped biases",
    "residuals in modules",
}
"""Pairs with the weights of a file."""
PORTS: dict[str, Style] = {
    "OLMo": Style("flat", proj="heads", rotary="complex", scores="both"),
    "Arcee": Style("wrapped", norm="moments", proj="pair", groups="expand", ffn="sequence"),
    "Helium": Style("dict", norm="squares", rotary="complex", groups="gqa", ffn="fused"),
    "ERNIE-4.5": Style("roles", norm="length", rotary="cached", groups="einsum", head="functional"),
    "Seed-OSS": Style("list", norm="sum", proj="heads", rotary="cached", mask="float", scores="queries"),
    "Hunyuan": Style("list", norm="functional", proj="fused", groups="expand", direct=True),
    "EXAONE-4": Style("flat", norm="moments", proj="kernel", ffn="kernel", add="torch"),
    "Jais-2": Style("sequential", norm="squares", proj="triple", ffn="conv", time=True),
    "GPT-1": Style("roles", proj="triple", ffn="sequence", scores="divided", mask="float"),
    "StarCoder": Style("wrapped", norm="functional", proj="heads", groups="einsum", head="matmul"),
    "EuroBERT": Style("dict", norm="length", proj="pair", rotary="complex", groups="expand", time=True),
}
"""Styles of the ports of published models."""


def drawn(opt: Spec, backwards: bool = False) -> Canon:
    """Fresh weights: a normal law, smaller by depth for the ends of branches; gains and biases at rest."""
    made: Canon = {}
    with torch.device("cpu"):
        shapes = [(name, value.shape) for name, value in canon_of(opt, 0).items()]
    for name, shape in reversed(shapes) if backwards else shapes:
        if name.endswith(".w"):
            made[name] = torch.full(shape, 1.0 - opt.plus)
        elif name.endswith(".b"):
            made[name] = torch.zeros(shape)
        else:
            is_end = name.rpartition(".")[2] in ("o", "down")
            made[name] = torch.randn(shape) * (0.02 / (2 * opt.depth) ** 0.5 if is_end else 0.02)
    return made


def ids_of(opt: Spec) -> Tensor:
    """Ids for both."""
    noise = torch.Generator().manual_seed(8)
    return torch.randint(0, opt.vocab, (3, 31), generator=noise, device="cpu")


def built(make: Make, opt: Spec, backwards: bool = False, held: Canon | None = None) -> Any:
    """A model, with its ids."""
    model = make(opt)
    model.fill(drawn(opt, backwards) if held is None else held)
    return model, ids_of(opt)


def held(make: Make, opt: Spec, of: Spec | None = None, change: Callable[[Canon], None] | None = None) -> Any:
    """A model with the weights of a file for `of`, which are changed before."""
    canon = canon_of(of or opt, SEED)
    if change is not None:
        change(canon)
    return built(make, opt, held=canon)


def ported(name: str, opt: Spec | None = None, change: Callable[[Canon], None] | None = None) -> Any:
    """The port of a published model."""
    model: Any = published(name)
    canon = model.canon(SEED)
    if change is not None:
        change(canon)
    return built(style_of(name), opt or model.opt, held=canon)


def style_of(name: str) -> Make:
    """The style of a port."""
    return partial(Model, style=PORTS[name])


def original(name: str) -> Any:
    """A published model, with its ids."""
    model: Any = published(name)
    return model.given(SEED), ids_of(model.opt)


def both_canon(opt: Spec, draw: Callable[[int], Canon]) -> Canon:
    """Weights of an encoder and a decoder."""
    base = draw(0)
    made = {k: base[k] for k in ("emb", "pos")}
    for letter, seed in (("e", 0), ("d", 1), ("x", 2)):
        found = draw(seed)
        for i in range(opt.depth):
            own = {k.partition(".")[2]: v for k, v in found.items() if k.startswith(f"{i}.")}
            if letter == "x":
                made |= {f"d{i}.x{r}{end}": own[f"{r}{end}"] for r in "qkvo" for end in ("", ".b")}
                made |= {f"d{i}.n3{end}": own[f"n1{end}"] for end in (".w", ".b")}
            else:
                made |= {f"{letter}{i}.{k}": v for k, v in own.items()}
        if letter != "x":
            made |= {f"{letter}.final{end}": found[f"final{end}"] for end in (".w", ".b")}
    return made


def texts(opt: Spec) -> dict[str, Tensor]:
    """Both texts."""
    ids = ids_of(opt)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :19].clone()}


def translator(way: Style, *, fresh: bool, opt: Spec = BOTH, causal: bool = True) -> Any:
    """An encoder with a decoder, and its texts."""
    model = Translator(opt, way, causal)
    draw = (lambda _: drawn(BOTH)) if fresh else (lambda seed: canon_of(BOTH, SEED + seed))
    model.fill(both_canon(BOTH, draw))
    return model, texts(BOTH)


WAYS = (
    (Style(), Style(proj="heads", scores="both", norm="moments", ffn="sequence"), True),
    (
        Style(proj="fused"),
        Style(time=True, add="torch", norm="functional", ffn="kernel", proj="kernel"),
        True,
    ),
    (Style(ffn="fused"), Style(proj="triple", scores="einsum", mask="fill", embed="index"), False),
)


def translators() -> Iterator[Case]:
    """Encoders with decoders."""
    for number, (a, b, fresh) in enumerate(WAYS):
        sides = [partial(translator, each, fresh=fresh) for each in (a, b)]
        yield Case(f"{'fresh' if fresh else 'held'}: translator {number}", "translator", sides[0], sides[1])


def cases() -> list[Case]:
    """All of them."""
    made = []
    for name, opt, a, b in ROWS:
        if name in HELD:
            made.append(Case(f"held: {name}", "own", partial(held, a, opt), partial(held, b, opt)))
        else:
            second = partial(built, b, opt, backwards="backwards" in name)
            made.append(Case(f"fresh: {name}", "own", partial(built, a, opt), second))
    ports = [
        Case(f"{name}, port: parity", name, partial(original, name), partial(ported, name)) for name in MAKERS
    ]
    return [*made, *ports, *translators()]
