"""Pairs with planted differences, in the code styles of `diff.new.same`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.diff.fresh.attention import Canon
from benchmarks.diff.fresh.planting import Mistake, at, changes_of, label, options_of, swap, truth
from benchmarks.diff.new.parts import Spec, Style
from benchmarks.diff.new.published import published
from benchmarks.diff.new.same import (
    BIASED,
    BOTH,
    CAPPED,
    GPT,
    LM,
    LOCAL,
    MULTIPLIED,
    PARALLEL,
    READER,
    Make,
    built,
    held,
    original,
    ported,
    style,
    style_of,
    translator,
)
from benchmarks.diff.plants import Case, Truth

M = Mistake


@dataclass(frozen=True)
class Row:
    """A model, its refactoring, and what went wrong."""

    opt: Spec
    a: Make
    b: Make
    mistakes: tuple[Mistake, ...]
    fresh: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def heads_moved(layer: int, size: int) -> Callable[[Canon], None]:
    """Put the heads of queries, keys and values of a layer into another order than those of the output."""

    def change(canon: Canon) -> None:
        for role in "qkv":
            for end in ("", ".b"):
                if (name := f"{layer}.{role}{end}") in canon:
                    canon[name] = canon[name].unflatten(0, (-1, size)).roll(1, 0).flatten(0, 1)

    return change


ROWS = [
    Row(GPT, style(), style(box="roles", proj="heads", scores="both"), (M("ε", "all", {"eps": 1e-3}),), True),
    Row(
        GPT, style(proj="fused"), style(box="dict", proj="triple", norm="moments"),
        (M("bias", "all attention", {"qkv_bias": False}),),
    ),
    Row(
        GPT, style(ffn="sequence"), style(box="flat", ffn="kernel", proj="kernel"),
        (M("activation", "mlp 1", {"act": "tanh"}),), True,
    ),
    Row(
        GPT, style(), style(box="wrapped", proj="heads", norm="squares"),
        (M("attention scale", "all attention", {"scale": 44**-0.5}),), True,
    ),
    Row(GPT, style(), style(box="roles", time=True, proj="triple"), (M("positions", "first", {"table": 1}),)),
    Row(
        GPT, style(), style(box="sequential", proj="heads", scores="queries"),
        (M("order of q, k, v", "attention 1", {}, swap("1.q", "1.k")),),
    ),
    Row(
        GPT, style(proj="fused"), style(box="dict", proj="triple", add="torch"),
        (M("order of heads", "attention 2", {}, heads_moved(2, 11)),),
    ),
    Row(
        LM, style(), style(box="flat", groups="expand", norm="length"),
        (M("rotary base", "all attention", {"base": 1e6}),), True,
    ),
    Row(
        LM, style(), style(box="dict", proj="heads", rotary="complex", norm="moments"),
        (M("rotary layout", "all attention", {"pairs": True}),),
    ),
    Row(
        LM, style(proj="fused"), style(box="roles", groups="einsum", mask="where", norm="squares"),
        (M("groups of heads", "all attention", {"tile": True}),),
    ),
    Row(
        LM, style(), style(time=True, proj="pair", ffn="conv", mask="float"),
        (M("gate and up", "all mlp", {"up_first": True}),),
    ),
    Row(
        LM, style(), style(box="sequential", proj="kernel", rotary="cached"),
        (M("final norm", "last", {"final": False}),), True,
    ),
    Row(
        LM, style(), style(box="dict", saving=True, scores="divided"),
        (M("residual", "layer 1", {"source": "normed"}),), True,
    ),
    Row(
        LM, style(groups="gqa"), style(box="flat", mask="fill", scores="einsum"),
        (M("causal mask", "attention 0", {"mask": "ahead"}),), True,
    ),
    Row(
        LM, style(), style(box="wrapped", norm="functional", proj="heads"),
        (M("no rotation", "attention 2", {"turned": 0}),), True,
    ),
    Row(
        LOCAL, style(mask="bool"), style(box="roles", mask="float", norm="length"),
        (M("window", "attention 1", {"window": 10}),), True,
    ),
    Row(
        LOCAL, style(), style(box="flat", proj="heads", norm="moments"),
        (M("QK-norm", "all attention", {"qk": ""}),),
    ),
    Row(
        LOCAL, style(proj="pair"), style(box="dict", norm="squares", rotary="cached"),
        (M("norm and rotation", "all attention", {"qk": "late"}),),
    ),
    Row(
        CAPPED, style(), style(box="flat", norm="squares", head="functional"),
        (M("gain + 1", "all", {"plus": 0.0}),),
    ),
    Row(
        CAPPED, style(embed="index"), style(embed="inside", box="roles", norm="moments"),
        (M("embedding scale", "first", {"emb": 1.0}),),
    ),
    Row(
        CAPPED, style(), style(box="dict", proj="heads", head="matmul"),
        (M("logit cap", "all attention", {"cap": None}),),
    ),
    Row(
        MULTIPLIED, style(), style(box="wrapped", groups="expand", norm="sum"),
        (M("branch scale", "layer 1", {"branch": 1.0}),), True,
    ),
    Row(
        MULTIPLIED, style(proj="fused"), style(box="flat", embed="index", head="einsum"),
        (M("head scale", "last", {"logits": 1.0}),), True,
    ),
    Row(
        PARALLEL, style(), style(box="dict", proj="heads", norm="moments"),
        (M("parallel", "layers", {"parallel": False}),), True,
    ),
    Row(
        BIASED, style(), style(proj="heads", groups="einsum", norm="length"),
        (M("bias", "attention 1", {"o_bias": False}),),
    ),
    Row(
        READER, style(), style(box="roles", groups="gqa", norm="moments", time=True),
        (M("rotary width", "all attention", {"turned": 4}),), True,
    ),
    Row(
        LM, style(), style(box="flat", proj="heads", norm="moments"),
        (M("ε", "all", {"eps": 1e-3}), M("activation", "mlp 2", {"act": "gelu"})),
    ),
]  # fmt: skip
PLANTED: list[tuple[str, Mistake]] = [
    ("OLMo", M("rotary layout", "all attention", {"pairs": True})),
    ("Arcee", M("activation", "all mlp", {"act": "relu"})),
    ("Helium", M("rotary base", "all attention", {"base": 1e4})),
    ("Seed-OSS", M("bias", "all attention", {"qkv_bias": False})),
    ("Hunyuan", M("QK-norm", "all attention", {"qk": ""})),
    ("Jais-2", M("scaled weights", "mlp 1", {}, at("1.down", lambda w: w * 0.5))),
    ("GPT-1", M("causal mask", "all attention", {"mask": "ahead"})),
    ("StarCoder", M("order of q, k, v", "attention 0", {}, swap("0.k", "0.v"))),
    ("EuroBERT", M("norm kind", "all", {"norm": "ln"})),
]
"""Published models and what is wrong in their ports."""


def changed(opt: Spec, mistakes: tuple[Mistake, ...]) -> Spec:
    """Options of the second side."""
    return replace(opt, **options_of(mistakes))


def truths(mistakes: tuple[Mistake, ...], depth: int, a: Any, b: Any) -> tuple[Truth, ...]:
    """The truths, from the places of both sides."""
    return tuple(truth(each, depth, lambda where: (a(where), b(where))) for each in mistakes)


def own() -> Iterator[Case]:
    """Models of one's own."""
    for row in ROWS:
        opt, wrong = row.opt, changed(row.opt, row.mistakes)
        places = (row.a(opt).places, row.b(wrong).places)
        if row.fresh:
            a, b = partial(built, row.a, opt), partial(built, row.b, wrong)
        else:
            a, b = partial(held, row.a, opt), partial(held, row.b, wrong, opt, changes_of(row.mistakes))
        name = f"{'fresh' if row.fresh else 'held'}: {label(row.mistakes)}"
        yield Case(name, "own", a, b, truths(row.mistakes, opt.depth, *places))


def ports() -> Iterator[Case]:
    """Ports of published models."""
    for name, mistake in PLANTED:
        model: Any = published(name)
        wrong = changed(model.opt, (mistake,))
        places = (model.places, style_of(name)(wrong).places)
        b = partial(ported, name, wrong, mistake.weights)
        found = truths((mistake,), model.opt.depth, *places)
        yield Case(f"{name}, port: {label((mistake,))}", name, partial(original, name), b, found)


def translators() -> Iterator[Case]:
    """Encoders with decoders."""
    places = [(f"decoder.{i}.self_attn", f"decoder.{i}.ln_self") for i in range(BOTH.depth)]
    sites = tuple((each, each) for each in places)
    a = partial(translator, Style(proj="fused"), fresh=False)
    b = partial(translator, Style(proj="heads", norm="moments"), fresh=False, causal=False)
    yield Case("held: translator, causal mask", "translator", a, b, (Truth("causal mask", sites),))


def cases() -> list[Case]:
    """All of them."""
    return [*own(), *ports(), *translators()]
