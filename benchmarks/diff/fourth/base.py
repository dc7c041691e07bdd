"""Types of the fourth set: families of models, their styles, mistakes, and pairs of these.

A family has a published model, whose weights are drawn once, and styles, each with a conversion of the
published weights. A pair is two styles of a family; a mistake changes the options of the second one, or what
its conversion does. The check (`diff.fourth.check`) also builds the second side without its mistakes.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case, Truth, expanded

State = dict[str, Tensor]
Change = Callable[[State], None]
VOCABULARY = 90


def ids(length: int = 24) -> Tensor:
    """Tokens of two texts."""
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Style:
    """A way to write the model of a family.

    Attributes:
        make: builds a fresh model from options.
        carry: conversion of the published weights.
        places: paths of "attention", "mlp" and "block" with {0} for the layer, and of "first", "last",
            "embed" and "head"; several with spaces between; "*" for code without modules.
    """

    make: Callable[..., nn.Module]
    carry: Callable[[State], State]
    places: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """A published model and its styles.

    Attributes:
        batch: what both sides get; None for a factory that returns the module alone.
        depth: layers that "all" has.
    """

    published: Callable[..., nn.Module]
    styles: Mapping[str, Style]
    batch: Callable[[], Any] = ids
    depth: int = 2


@dataclass(frozen=True)
class Mistake:
    """A change of the second side.

    Attributes:
        kind: key of `KINDS`.
        where: place, as in `diff.plants.Plant`.
        options: changed options of the second side.
        given: a change of the published weights before the second side's conversion.
        loaded: a change of the converted weights.
        source: address of a report of the mistake.
    """

    kind: str
    where: str
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Change | None = None
    loaded: Change | None = None
    source: str = ""


@dataclass(frozen=True)
class Pair:
    """Two styles of a family.

    Attributes:
        of: name of the family.
        is_fresh: whether both sides draw their weights, by one law, instead of loading the published ones.
        is_alone: whether the factories return the module without a batch.
        options: options of both sides.
    """

    of: str
    family: Family
    a: str
    b: str
    mistakes: tuple[Mistake, ...] = ()
    is_fresh: bool = False
    is_alone: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """The pair in words."""
        planted = " + ".join(f"{each.kind} at {each.where}" for each in self.mistakes)
        how = "fresh" if self.is_fresh else "loaded"
        said = f" ({self.note})" if self.note else ""
        return f"{self.of}, {self.a} and {self.b}, {how}: {planted or 'the same'}{said}"

    def case(self) -> Case:
        """The pair for `diff.runs`."""
        truths = tuple(truth_of(self, each) for each in self.mistakes)
        return Case(self.name, self.of, partial(side, self, "a"), partial(side, self, "b"), truths)


def truth_of(pair: Pair, mistake: Mistake) -> Truth:
    """The truth of a mistake, by the places of both styles."""
    styles = [pair.family.styles[each] for each in (pair.a, pair.b)]
    sites = []
    for where in expanded(mistake.where, pair.family.depth):
        word, _, layer = where.partition(" ")
        both = [paths(style, word, layer) for style in styles]
        if KINDS[mistake.kind].of_block and layer:
            both = [(*each, *paths(style, "block", layer)) for each, style in zip(both, styles, strict=True)]
        sites.append((both[0], both[1]))
    return Truth(mistake.kind, tuple(sites))


def paths(style: Style, word: str, layer: str) -> tuple[str, ...]:
    """Paths of a place in a style; {0} counts layers from 0, {1} from 1."""
    numbers = (layer, int(layer) + 1) if layer else ()
    return tuple(style.places[word].format(*numbers).split())


def build(pair: Pair, which: str, *, is_clean: bool = False) -> nn.Module:
    """One side's model; without its mistakes where `is_clean`."""
    style = pair.family.styles[pair.a if which == "a" else pair.b]
    mistakes = () if which == "a" or is_clean else pair.mistakes
    model = style.make(**{k: v for each in mistakes for k, v in each.options.items()})
    if not pair.is_fresh:
        state = dict(saved(pair.family.published))
        for each in mistakes:
            if each.given is not None:
                each.given(state)
        state = style.carry(state)
        for each in mistakes:
            if each.loaded is not None:
                each.loaded(state)
        load(model, state, is_strict=not mistakes)
    return model


def load(model: nn.Module, state: State, *, is_strict: bool) -> None:
    """Load weights; without mistakes, every parameter must be given."""
    known = model.state_dict()
    fitting = {k: v for k, v in state.items() if k in known and known[k].shape == v.shape}
    if is_strict:
        missing = {name for name, _ in model.named_parameters()} - set(fitting)
        surplus = set(state) - set(fitting)
        if missing or surplus:
            raise ValueError(f"missing {sorted(missing)}, surplus {sorted(surplus)}")
    model.load_state_dict(fitting, strict=False)


def side(pair: Pair, which: str) -> Any:
    """The return value of a factory of a pair."""
    model = build(pair, which)
    return model if pair.is_alone else (model, pair.family.batch())


@cache
def saved(published: Callable[..., nn.Module]) -> State:
    """The weights of a file: drawn once, with no gain at 1 and no bias at 0."""
    with torch.random.fork_rng():
        torch.manual_seed(17)
        model = published()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, dtype=torch.float64)
                parameter.add_((0.2 if parameter.dim() == 1 else 0.12) * noise)
        return {name: value.clone() for name, value in model.state_dict().items()}


def renamed(state: State, *table: tuple[str, str], drop: str = r"$^") -> State:
    """State with names changed by regular expressions in order; names that `drop` matches are left out."""
    made = {}
    for key, value in state.items():
        if re.search(drop, key):
            continue
        name = key
        for pattern, text in table:
            name = re.sub(pattern, text, name)
        made[name] = value
    return made


def fused(state: State, result: str, *parts: str, how: Callable[..., Tensor] = torch.cat) -> None:
    """Replace each group of entries by one; the names hold {} for the layer and for "weight" or "bias"."""
    for layer in range(99):
        for kind in ("weight", "bias"):
            names = [part.format(layer, kind) for part in parts]
            if names[0] in state:
                state[result.format(layer, kind)] = how([state.pop(name) for name in names])


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys for a rotation of neighbours, from those for a rotation of halves."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys for a rotation of halves, from those for a rotation of neighbours."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def by_head(parts: list[Tensor], heads: int) -> Tensor:
    """Rows of q, k, v of the first group of heads, then of the second, and so on."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def same(state: State) -> State:
    """The published weights as they are."""
    return state


def no_tied(state: State) -> State:
    """The published weights without the head that repeats the table."""
    return {key: value for key, value in state.items() if key != "lm_head.weight"}


def swapped(pattern: str, how: Callable[[Tensor], Tensor]) -> Change:
    """A change of all entries whose name matches."""

    def change(state: State) -> None:
        found = [key for key in state if re.search(pattern, key)]
        if not found:
            raise KeyError(pattern)
        for key in found:
            state[key] = how(state[key]).clone()

    return change


def gelu_tanh(x: Tensor, c: float = math.sqrt(2 / math.pi)) -> Tensor:
    """GELU by tanh, as Megatron spells it."""
    return x * 0.5 * (1 + torch.tanh(c * x * (1 + 0.044715 * x * x)))
