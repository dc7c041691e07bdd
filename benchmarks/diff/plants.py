"""Planted differences with their truth: which model, what was changed, where, and what it is called.

A `Plant` changes the options of a port, the state that its conversion loads, or both; `ported`, `configured`
and `rewritten` make cases of plants. The truth is written with the plant and never read from the tool.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.families import FAMILIES, Family, Places, Size, State, lively
from benchmarks.diff.kinds import KINDS

Build = Callable[[], Any] | str


@dataclass(frozen=True)
class Truth:
    """A planted difference and its places.

    Attributes:
        kind: key of `KINDS`.
        sites: places in the order of the forward pass: modules of A and modules of B, any of which is right.
        says: what the message must name, where there are no places: the role of parameters in a recipe.
    """

    kind: str
    sites: tuple[tuple[Places, Places], ...]
    says: str = ""


@dataclass(frozen=True)
class Case:
    """Two models as functions that build them, and what differs, in the order of the forward pass."""

    name: str
    architecture: str
    a: Build
    b: Build
    truths: tuple[Truth, ...] = ()


@dataclass(frozen=True)
class Plant:
    """A change of one kind.

    Attributes:
        kind: key of `KINDS`.
        where: "attention 1", "mlp 0", "first", "last"; of several places "layer 1", "all attention",
            "all mlp", "all", which has the last norm, "everywhere", which has the first one as well, or
            places with commas.
        options: changed options of the port, in a single layer where `where` has one.
        state: a change of the state of the published model before it is converted (A → B).
        loaded: a change of the state of the port before it is loaded.
    """

    kind: str
    where: str
    options: Mapping[str, Any] = field(default_factory=dict)
    state: Callable[[State], None] | None = None
    loaded: Callable[[State], None] | None = None


def expanded(where: str, depth: int) -> list[str]:
    """Single places, in the order of the forward pass."""
    branches = [f"{branch} {layer}" for layer in range(depth) for branch in ("attention", "mlp")]
    made: list[str] = []
    for part in where.split(", "):
        word, _, rest = part.partition(" ")
        if word in ("all", "everywhere") and not rest:
            made += [*(["first"] if word == "everywhere" else []), *branches, "last"]
        elif word == "all":
            made += [f"{rest} {layer}" for layer in range(depth)]
        elif word == "layer":
            made += [f"attention {rest}", f"mlp {rest}"]
        else:
            made.append(part)
    return made


def truth_of(family: Family, plant: Plant) -> Truth:
    """The truth of a plant."""
    places = [family.places(each) for each in expanded(plant.where, family.options.depth)]
    if KINDS[plant.kind].of_block:
        blocks = [tuple(each.rpartition(".")[0] for each in side[:1]) for side in places[0]]
        places = [(a + blocks[0], b + blocks[1]) for a, b in places]
    return Truth(plant.kind, tuple(places))


def _options(family: Family, plants: tuple[Plant, ...]) -> dict[str, Any]:
    """Changes of the port's options by all plants; in a layer where the plant has one."""
    changes: dict[str, Any] = {"layers": {k: dict(v) for k, v in family.options.layers.items()}}
    for plant in plants:
        _, _, layer = plant.where.partition(" ")
        if plant.options and layer.isdigit():
            key: Any = f"encoder.{layer}" if hasattr(family.options, "far") else int(layer)
            changes["layers"].setdefault(key, {}).update(plant.options)
        else:
            changes.update(plant.options)
    return changes


@cache
def saved(build: Callable[[], nn.Module], seed: int) -> State:
    """The weights of a file, which are drawn once."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {name: value.clone() for name, value in lively(build(), seed).state_dict().items()}


def given(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with the weights of a file."""
    model = build()
    model.load_state_dict(saved(build, seed))
    return model


def converted(
    family: Family, plants: tuple[Plant, ...], seed: int, change: Callable[[State], None] | None = None
) -> nn.Module:
    """The port with all plants and the converted weights; what has no counterpart keeps its fresh value.

    Args:
        change: a further change of the converted weights.
    """
    state = dict(saved(family.published, seed))
    for plant in plants:
        if plant.state is not None:
            plant.state(state)
    made = dict(family.convert(state, family.options))
    for each in (*(plant.loaded for plant in plants), change):
        if each is not None:
            each(made)
    port = family.port(**_options(family, plants))
    load(port, made)
    return port


def load(model: nn.Module, state: State) -> None:
    """Load what fits."""
    known = model.state_dict()
    fitting = {k: v.clone() for k, v in state.items() if k in known and known[k].shape == v.shape}
    model.load_state_dict(fitting, strict=False)


def ported(name: str, size: Size, *plants: Plant, seed: int = 5) -> Case:
    """A published model against its port with plants; both have the published model's weights."""
    family = FAMILIES[name](size)
    a = partial(given, family.published, seed)
    b = partial(converted, family, plants, seed)
    label = " + ".join(f"{plant.kind} at {plant.where}" for plant in plants) or "parity"
    return Case(f"{name}, port: {label}", name, a, b, tuple(truth_of(family, plant) for plant in plants))


def configured(name: str, size: Size, kind: str, where: str, seed: int = 5, **changes: Any) -> Case:
    """A published model against itself with changes of its configuration, with the same weights."""
    family = FAMILIES[name](size)

    def changed() -> nn.Module:
        model = family.published(**changes)
        state = dict(saved(family.published, seed))
        if "tie_word_embeddings" in changes:
            del state["lm_head.weight"]  # else the embedding gets the head's values
        load(model, state)
        return model

    sites = [family.places(each) for each in expanded(where, family.options.depth)]
    truth = Truth(kind, tuple((a, a) for a, _ in sites))
    return Case(
        f"{name}, configuration: {changes}", name, partial(given, family.published, seed), changed, (truth,)
    )


def rewritten(name: str, a: Build, b: Build, kind: str, *sites: tuple[Places, Places]) -> Case:
    """Two fresh models of the user's own; the architecture is the beginning of the name."""
    return Case(name, name.partition(":")[0], a, b, (Truth(kind, sites),) if kind else ())


def shifted(pattern: str, by: float) -> Callable[[State], None]:
    """Add a number to all entries whose name ends so."""

    def change(state: State) -> None:
        for name in _named(state, pattern):
            state[name] = state[name] + by

    return change


def changed(pattern: str, how: Callable[[Tensor], Tensor]) -> Callable[[State], None]:
    """Change all entries whose name ends so."""

    def change(state: State) -> None:
        for name in _named(state, pattern):
            state[name] = how(state[name]).clone()

    return change


def _named(state: State, pattern: str) -> Iterator[str]:
    found = [name for name in state if name.endswith(pattern)]
    assert found, pattern
    return iter(found)
