"""Pairs of one model that other people would write in another way; nothing may be reported."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.diff.fresh.attention import Canon, Opt
from benchmarks.diff.fresh.decoders import Decoder
from benchmarks.diff.fresh.encoders import FAMILIES
from benchmarks.diff.fresh.own import FRESH, PLAIN, Law, normal, run, started
from benchmarks.diff.fresh.planting import SEED, as_pairs, other, port, swap
from benchmarks.diff.fresh.ports import Form, Reader, State
from benchmarks.diff.fresh.published import loaded
from benchmarks.diff.fresh.refactored import (
    Grouped,
    Headless,
    Heads,
    Inline,
    Lazy,
    Masked,
    Move,
    Named,
    Outer,
    Saving,
    TimeFirst,
    Turning,
    backwards,
    careful,
    changed,
    compiled,
    dead,
    kernels,
    mixers,
    pointwise,
    sequence,
)
from benchmarks.diff.fresh.types import MAKERS
from benchmarks.diff.fresh.weights import canon_of, pack
from benchmarks.diff.plants import Case


def into_hand(state: State) -> State:
    """Rows of `nn.MultiheadAttention` as three projections."""
    made: State = {}
    for name, value in state.items():
        head, found, leaf = name.partition("mha.in_proj_")
        if found:
            made |= {f"{head}maps.{r}.{leaf}": p for r, p in zip("qkv", value.chunk(3), strict=True)}
        else:
            made[name.replace("mha.out_proj", "maps.o")] = value
    return made


def _renamed(old: str, new: str) -> Move:
    return lambda state: {k.replace(old, new, 1): v for k, v in state.items()}


def _transposed(state: State) -> State:
    inside = ("_lin.weight", "w1.weight", "w2.weight", "w3.weight")
    return {k: v.T if k.endswith(inside) else v for k, v in state.items()}


def _of_heads(opt: Opt) -> Move:
    def move(state: State) -> State:
        made: State = {}
        for name, value in state.items():
            head, found, rest = name.partition(".sa.")
            role, _, leaf = rest.partition("_lin.")
            if found and role in ("q", "k", "v"):
                full = {"q": "query", "k": "key", "v": "value"}[role]
                parts = value.unflatten(0, (opt.heads, -1))
                made |= {f"{head}.sa.heads.{h}.{full}.{leaf}": parts[h] for h in range(opt.heads)}
            else:
                made[name] = value
        return made

    return move


def _pointed(state: State) -> State:
    ends = ("w1.weight", "w2.weight")
    return {k: v[..., None] if k.endswith(ends) else v for k, v in state.items()}


def _as_sequence(opt: Opt) -> Move:
    def move(state: State) -> State:
        made = {k.replace("h.", "", 1): v for k, v in state.items() if k.startswith("h.")}
        made = {f"{int(k.partition('.')[0]) + 1}.{k.partition('.')[2]}": v for k, v in made.items()}
        made |= {f"0.{k}": v for k, v in state.items() if k.startswith(("wte", "wpe"))}
        return made | {k.replace("ln_f", f"{opt.depth + 1}"): v for k, v in state.items() if "ln_f" in k}

    return move


def _stacked(canon: Canon, opt: Opt) -> State:
    made = {"wte.weight": canon["emb"], "wpe.weight": canon["pos"]}
    made |= {"ln_f.weight": canon["final.w"], "ln_f.bias": canon["final.b"]}
    for role in ("q", "k", "v", "o", "up", "down"):
        made[f"w.{role}"] = torch.stack([canon[f"{i}.{role}"] for i in range(opt.depth)])
        made[f"c.{role}"] = torch.stack([canon[f"{i}.{role}.b"] for i in range(opt.depth)])
    for role in ("n1", "n2"):
        made[f"g.{role}"] = torch.stack([canon[f"{i}.{role}.w"] for i in range(opt.depth)])
        made[f"h.{role}"] = torch.stack([canon[f"{i}.{role}.b"] for i in range(opt.depth)])
    return made


def _paired(canon: Canon, opt: Opt) -> Canon:
    """Queries and keys for rotary positions of neighbours."""
    ends = ("q", "k", "q.b", "k.b")
    return {
        k: as_pairs(v, opt.size, opt.turned) if k.partition(".")[2] in ends else v for k, v in canon.items()
    }


Made = tuple[Callable[[], nn.Module], Callable[[Canon], State]]
"""A function that builds a model, and its weights from those that both sides hold."""


def style(opt: Opt, name: str, make: Any = Decoder, move: Move | None = None) -> Made:
    """A decoder of a style."""

    def weights(canon: Canon) -> State:
        state = pack(canon, opt, name)
        return state if move is None else move(state)

    return partial(make, opt, name), weights


def edited(opt: Opt, edit: Callable[[nn.Module], None], move: Move | None = None) -> Made:
    """A decoder of the style `split` after a change of its modules."""
    return partial(changed, opt, edit), style(opt, "split", move=move)[1]


NEOX = replace(PLAIN, table=None, turned=4, parallel=True, tied=False, size=8, act="tanh")
MUP = replace(FRESH, emb=6.0, branch=0.3, scale=0.02, logits=0.125)
ALIBI = replace(PLAIN, table=None, slopes="closest", emb_norm=True)
LATE = replace(FRESH, qk="head", window=14, tied=True)
WIDE = replace(FRESH, width=96, depth=2, heads=6, kv=2, size=22, turned=22, hidden=64, vocab=500)
DEEP = replace(FRESH, width=24, depth=8, heads=2, kv=1, size=14, turned=14, hidden=36, vocab=50)
READER = Form(36, 2, 3, 50, 256, act="gelu")


def pairs() -> dict[str, tuple[Opt, Made, Made]]:
    """Decoders, fresh: options of both, A and B."""
    plain, small = style(PLAIN, "split"), style(FRESH, "split")
    turned = (partial(changed, FRESH, mixers(Turning)), lambda c: pack(_paired(c, FRESH), FRESH, "split"))
    neighbours = replace(FRESH, pairs=True)
    paired = (partial(Decoder, neighbours, "einsum"), lambda c: pack(_paired(c, FRESH), FRESH, "einsum"))
    return {
        "grouped queries, fused and split": (FRESH, style(FRESH, "fused"), small),
        "grouped queries, split and einsum": (FRESH, small, style(FRESH, "einsum")),
        "positions, einsum and fused": (PLAIN, style(PLAIN, "einsum"), style(PLAIN, "fused")),
        "parallel branches": (NEOX, style(NEOX, "fused"), style(NEOX, "split")),
        "multipliers": (MUP, style(MUP, "split"), style(MUP, "fused")),
        "slopes": (ALIBI, style(ALIBI, "einsum"), style(ALIBI, "split")),
        "norms of queries, window": (LATE, style(LATE, "fused"), style(LATE, "einsum")),
        "wide heads": (WIDE, style(WIDE, "split"), style(WIDE, "fused")),
        "eight layers": (DEEP, style(DEEP, "fused"), style(DEEP, "split")),
        "kernels (in, out)": (PLAIN, plain, edited(PLAIN, kernels, _transposed)),
        "convolutions of size 1": (PLAIN, plain, edited(PLAIN, pointwise, _pointed)),
        "heads in a list": (PLAIN, style(PLAIN, "fused"), edited(PLAIN, mixers(Heads), _of_heads(PLAIN))),
        "layers in a dictionary": (
            FRESH,
            small,
            style(FRESH, "split", Named, _renamed("blocks.", "stages.stage")),
        ),
        "no head": (PLAIN, plain, style(PLAIN, "split", Headless)),
        "one mask": (FRESH, small, style(FRESH, "split", Masked)),
        "a lazy mask": (PLAIN, plain, edited(PLAIN, mixers(Lazy))),
        "checkpointing": (PLAIN, style(PLAIN, "fused"), style(PLAIN, "fused", Saving)),
        "compiled": (
            FRESH,
            small,
            (compiled, lambda c: _renamed("", "_orig_mod.")(pack(c, FRESH, "split"))),
        ),
        "in a trainer": (
            NEOX,
            style(NEOX, "fused"),
            (lambda: Outer(Decoder(NEOX, "fused")), lambda c: _renamed("", "net.")(pack(c, NEOX, "fused"))),
        ),
        "norms in float32": (FRESH, small, edited(FRESH, careful)),
        "complex rotations": (FRESH, small, turned),
        "rotations of neighbours": (FRESH, style(FRESH, "fused"), paired),
        "PyTorch's groups": (FRESH, style(FRESH, "einsum"), edited(FRESH, mixers(Grouped))),
        "parameters without use": (PLAIN, plain, edited(PLAIN, dead)),
        "a sequence": (
            PLAIN,
            plain,
            (partial(sequence, PLAIN), lambda c: _as_sequence(PLAIN)(pack(c, PLAIN, "fused"))),
        ),
        "stacked layers": (PLAIN, plain, (partial(Inline, PLAIN), lambda c: _stacked(c, PLAIN))),
        "drawn backwards": (FRESH, small, (partial(backwards, FRESH, "split"), small[1])),
        "drawn backwards, other style": (
            PLAIN,
            plain,
            (partial(backwards, PLAIN, "einsum"), style(PLAIN, "einsum")[1]),
        ),
    }


def held(opt: Opt, made: Made, seed: int = SEED) -> nn.Module:
    """A decoder with the weights of a file."""
    return loaded(made[0](), made[1](canon_of(opt, seed)))


def with_weights() -> Iterator[Case]:
    """Decoders that hold the weights of a file."""
    found = pairs()
    for name in (
        "grouped queries, split and einsum",
        "complex rotations",
        "heads in a list",
        "slopes",
        "a sequence",
    ):
        opt, a, b = found[name]
        yield Case(f"weights: {name}", "own", partial(held, opt, a), partial(held, opt, b))
    swapped = replace(FRESH, up_first=True)

    def up_first(canon: Canon) -> State:
        for i in range(FRESH.depth):
            swap(f"{i}.gate", f"{i}.up")(canon)
        return pack(canon, swapped, "fused")

    b = (partial(Decoder, swapped, "fused"), up_first)
    yield Case(
        "weights: gate second", "own", partial(held, FRESH, style(FRESH, "split")), partial(held, FRESH, b)
    )


def readers() -> Case:
    """`nn.MultiheadAttention` against attention of one's own, time first."""
    return Case("refactoring: time first", "own", partial(Reader, READER), partial(TimeFirst, READER))


def scaled(std: float) -> Law:
    """Standard normal numbers times a deviation."""

    def law(_: str, parameter: nn.Parameter) -> None:
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape) * std)

    return law


def by_method(_: str, parameter: nn.Parameter) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0, 0.02)


def starts() -> Iterator[Case]:
    """One law in other words."""
    deep = 0.02 / (2 * FRESH.depth) ** 0.5
    ends = ("out_lin.weight", "w2.weight")

    def shrunk(name: str, parameter: nn.Parameter) -> None:
        if name.endswith(ends):
            parameter.mul_(deep / 0.02)

    yield started("scaled afterwards", "", (), (normal(0.02), normal(deep, *ends)), (scaled(0.02), shrunk))
    yield started("drawn by the library", "", (), (normal(0.02),), (by_method,))


def recipes() -> Iterator[Case]:
    """One recipe in other words."""
    yield Case("recipe: again", "recipe", run, run)
    yield Case("recipe: another style", "recipe", run, partial(run, "fused"))


def parity() -> Iterator[Case]:
    """Published models against their ports."""
    names = ("fused", "einsum", "split")
    for number, name in enumerate(MAKERS):
        yield port(name, names[number % 3])
    yield from (other(name) for name in FAMILIES)


def cases() -> list[Case]:
    """All of them."""
    fresh_pairs = [Case(f"refactoring: {name}", "own", a[0], b[0]) for name, (_, a, b) in pairs().items()]
    return [*parity(), *fresh_pairs, *with_weights(), readers(), *starts(), *recipes()]
