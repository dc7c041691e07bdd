"""Planted mistakes: ports and models that have them, and their truth."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.diff.families import Places
from benchmarks.diff.fresh.attention import Canon, Opt
from benchmarks.diff.fresh.decoders import STYLES, Decoder
from benchmarks.diff.fresh.encoders import FAMILIES
from benchmarks.diff.fresh.published import loaded
from benchmarks.diff.fresh.types import builder, published
from benchmarks.diff.fresh.weights import pack
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case, Truth

SEED = 41
GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Mistake:
    """A change of one kind.

    Attributes:
        kind: key of `KINDS`.
        where: places with commas: "attention 1", "all mlp", "layer 0", "layers", "all" (layers and last),
            "everywhere", "first", "last"; of translators also "all cross", "all d-mlp" and so on.
        options: changed options of the port.
        weights: a change of the converted weights.
        source: where it was reported.
    """

    kind: str
    where: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Callable[[Any], None] | None = None
    source: str = ""


def expanded(where: str, depth: int) -> Iterator[str]:
    """Single places, in the order of the forward pass."""
    for part in where.split(", "):
        word, _, rest = part.partition(" ")
        if part in ("layers", "all", "everywhere"):
            yield from ["first"] if part == "everywhere" else []
            yield from (f"{branch} {i}" for i in range(depth) for branch in ("attention", "mlp"))
            yield from [] if part == "layers" else ["last"]
        elif word == "all":
            yield from (f"{rest} {i}" for i in range(depth))
        elif word == "layer":
            yield from (f"attention {rest}", f"mlp {rest}")
        else:
            yield part


def truth(mistake: Mistake, depth: int, places: Callable[[str], tuple[Places, Places]]) -> Truth:
    """The truth of a mistake; what concerns both branches of a block may be named by the block."""
    sites = [places(each) for each in expanded(mistake.where, depth)]
    if KINDS[mistake.kind].of_block:
        sites = [tuple((*s, s[0].rpartition(".")[0]) for s in pair) for pair in sites]  # type: ignore[misc]
    return Truth(mistake.kind, tuple(sites))


def own_places(style: str) -> Callable[[str], Places]:
    """Modules of a decoder of a style."""
    norm_a, mixer, norm_b, ffn = STYLES[style][2]
    prefix = {"fused": "h.{}", "einsum": "layer_{}", "split": "blocks.{}"}[style]
    ends = {"first": ("wte", "wpe", "embedding", "positions", "emb_norm")}
    ends["last"] = ("ln_f", "lm_head", "unembed", "unembed_bias", "embedding")

    def places(where: str) -> Places:
        if where in ends:
            return ends[where]
        branch, _, layer = where.partition(" ")
        pair = (mixer, norm_a) if branch == "attention" else (ffn, norm_b, norm_a)
        return tuple(f"{prefix.format(layer)}.{each}" for each in pair)

    return places


def label(mistakes: tuple[Mistake, ...]) -> str:
    """Part of a case's name: the kinds and their places."""
    return " + ".join(f"{each.kind} at {each.where}" for each in mistakes) or "parity"


def changes_of(mistakes: tuple[Mistake, ...]) -> Callable[[Any], None] | None:
    """All changes of the converted weights; None without any."""
    return all_of([each.weights for each in mistakes if each.weights])


def options_of(mistakes: tuple[Mistake, ...]) -> dict[str, Any]:
    """Changed options, in a layer where the mistake is in one."""
    made: dict[str, Any] = {}
    for mistake in mistakes:
        word, _, layer = mistake.where.partition(" ")
        is_one = layer.isdigit() and word in ("layer", "attention", "mlp") and "layers" not in mistake.options
        if is_one and mistake.options:
            made.setdefault("layers", {}).setdefault(int(layer), {}).update(mistake.options)
        else:
            made |= mistake.options
    return made


def merged(opt: Opt, mistakes: tuple[Mistake, ...]) -> Opt:
    """The options of a port with mistakes."""
    changes = options_of(mistakes)
    if "layers" in changes and not any("layers" in m.options for m in mistakes):
        known = {k: dict(v) for k, v in opt.layers.items()}
        for layer, own in changes["layers"].items():
            known.setdefault(layer, {}).update(own)
        changes["layers"] = known
    return replace(opt, **changes)


def ported(name: str, style: str, seed: int, opt: Opt, change: Callable[[Any], None] | None) -> Any:
    """A decoder of a style with the weights of a published one, and a batch where it has no table module."""
    model = published(name)
    canon = model.canon(seed)
    if change is not None:
        change(canon)
    made = loaded(Decoder(opt, style), pack(canon, model.opt, style))
    if style != "einsum":
        return made
    return made, torch.randint(0, opt.vocab, (4, 48), generator=torch.Generator().manual_seed(6))


def port(name: str, style: str, *mistakes: Mistake, seed: int = SEED) -> Case:
    """A published decoder against its port with mistakes."""
    model, ours = published(name), own_places(style)
    truths = [truth(m, model.opt.depth, lambda w: (model.places(w), ours(w))) for m in mistakes]
    b = partial(ported, name, style, seed, merged(model.opt, mistakes), changes_of(mistakes))
    return Case(f"{name}, {style}: {label(mistakes)}", name, builder(name, seed), b, tuple(truths))


def other(name: str, *mistakes: Mistake, seed: int = SEED) -> Case:
    """A published encoder, image model or translator against its port with mistakes."""
    family = FAMILIES[name]
    truths = tuple(truth(m, family.form.depth, family.places) for m in mistakes)
    changes = {k: v for m in mistakes for k, v in m.options.items()}
    b = partial(family.ported, seed, changes_of(mistakes), **changes)
    return Case(f"{name}, port: {label(mistakes)}", name, partial(family.given, seed), b, truths)


def all_of(changes: list[Callable[[Any], None]]) -> Callable[[Any], None] | None:
    """The changes, one after the other."""

    def change(state: Any) -> None:
        for each in changes:
            each(state)

    return change if changes else None


def at(pattern: str, how: Callable[[Tensor], Tensor]) -> Callable[[Canon], None]:
    """Change all weights whose role ends so."""

    def change(canon: Canon) -> None:
        found = [name for name in canon if name == pattern or name.endswith(f".{pattern}")]
        assert found, pattern
        for name in found:
            canon[name] = how(canon[name]).clone()

    return change


def swap(*roles: str) -> Callable[[Canon], None]:
    """Put the weights of the first role under the second and so on, the last under the first."""

    def change(canon: Canon) -> None:
        held = [canon[role] for role in roles]
        for role, value in zip((*roles[1:], roles[0]), held, strict=True):
            canon[role] = value

    return change


def read_flat(heads: int, size: int, depth: int) -> Callable[[Canon], None]:
    """Read rows that stand head by head as if all queries came first."""

    def change(canon: Canon) -> None:
        for i in range(depth):
            for end in ("", ".b"):
                parts = [canon[f"{i}.{r}{end}"].unflatten(0, (heads, size)) for r in "qkv"]
                flat = torch.stack(parts, 1).flatten(0, 2).chunk(3)
                for role, part in zip("qkv", flat, strict=True):
                    canon[f"{i}.{role}{end}"] = part

    return change


def as_pairs(weight: Tensor, size: int, turned: int | None = None) -> Tensor:
    """Rows of q or k of which the rotated halves are interleaved."""
    rows = weight.unflatten(0, (-1, size))
    turned = turned or size
    part = rows[:, :turned].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((part, rows[:, turned:]), 1).flatten(0, 1)


def permuted(size: int, *ends: str) -> Callable[[Canon], None]:
    """Permute queries and keys of all layers."""

    def change(canon: Canon) -> None:
        for role in [f"{r}{end}" for r in "qk" for end in ends]:
            at(role, partial(as_pairs, size=size))(canon)

    return change


def head_is_embedding(canon: Canon) -> None:
    """Forget the head."""
    canon["head"] = canon["emb"]


def gain(name: str, by: float) -> Callable[[Canon], None]:
    return at(name, lambda w: w + by)


def both(*changes: Callable[[Canon], None]) -> Callable[[Canon], None]:
    made = all_of(list(changes))
    assert made is not None
    return made
