"""Styles of writing a model, and pairs of them, for the sets `third` and `same-third`.

A family is an architecture: a reference, its sizes and its batch. A style writes it in its own way, has a
conversion of the reference's state, as one who ports a checkpoint has, and may contain one mistake (`slip`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.families import Places, State, lively
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case, Truth, expanded

Batch = Any
SEED = 17


@dataclass(frozen=True)
class Style:
    """A way of writing a model.

    Attributes:
        make: fresh model; takes `slip`, the name of a mistake, unless it is the reference.
        convert: the state of this style from the reference's.
        block: modules of a layer, with `{}` for its number.
        attention: modules of an attention branch with its norms.
        mlp: modules of a feed-forward branch with its norms.
        first: embeddings and what follows them before the layers.
        last: what follows the layers.
    """

    make: Callable[..., nn.Module]
    convert: Callable[[State], State]
    block: Places
    attention: Places
    mlp: Places
    first: Places
    last: Places

    def places(self, where: str) -> Places:
        """Modules of a place: "attention 1", "mlp 0", "block 2", "first", "last"."""
        branch, _, layer = where.partition(" ")
        names: Places = getattr(self, branch)
        return tuple(name.format(layer) for name in names)

    def inside(self, prefix: str, wrap: Callable[[nn.Module], nn.Module]) -> "Style":
        """The same style inside of another module, which holds it under a prefix."""

        def made(**options: Any) -> nn.Module:
            return wrap(self.make(**options))

        def converted(state: State) -> State:
            return {f"{prefix}.{name}": value for name, value in self.convert(state).items()}

        names = (self.block, self.attention, self.mlp, self.first, self.last)
        moved = [tuple(f"{prefix}.{name}" for name in each) for each in names]
        return Style(made, converted, *moved)


@dataclass(frozen=True)
class Family:
    """An architecture: its reference and the batch that all of its styles take."""

    name: str
    depth: int
    reference: Style
    batch: Callable[[], Batch]
    styles: Mapping[str, Style] = field(default_factory=dict)

    def style(self, name: str) -> Style:
        """A style by its name; "published" is the reference."""
        return self.reference if name == "published" else self.styles[name]


def state_of(family: Family) -> State:
    """The weights of the reference's file."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = lively(family.reference.make(), SEED)
        return {name: value.clone() for name, value in model.state_dict().items()}


def fresh(family: Family, name: str, options: Mapping[str, Any]) -> tuple[nn.Module, Batch]:
    """A model with fresh weights, and its batch."""
    return family.style(name).make(**options), family.batch()


def held(family: Family, name: str, options: Mapping[str, Any]) -> tuple[nn.Module, Batch]:
    """A model with the converted weights, and its batch; a mistake may leave weights without a place."""
    model, batch = fresh(family, name, options)
    made, known = family.style(name).convert(state_of(family)), model.state_dict()
    fitting = {k: v for k, v in made.items() if k in known and known[k].shape == v.shape}
    if not options and len(fitting) < len(made):
        raise ValueError(f"{name} has no place for {sorted(set(made) - set(fitting))}")
    model.load_state_dict(fitting, strict=False)
    return model, batch


def same(family: Family, a: str, b: str, *, how: str = "held") -> Case:
    """The same model in two styles.

    Args:
        how: "held", both with the weights of a file, or "fresh".
    """
    build = held if how == "held" else fresh
    one, two = (partial(build, family, name, {}) for name in (a, b))
    return Case(f"{how}: {family.name}, {a} and {b}", family.name, one, two)


def planted(
    family: Family,
    a: str,
    b: str,
    slip: str,
    *plants: tuple[str, str],
    how: str = "held",
) -> Case:
    """A style against another one that has a mistake.

    Args:
        slip: name of the mistake in B; "" if it is in the conversion of B.
        plants: kind and place of each, in the order of the forward pass; the place "branches" is all
            branches without the last norm.
    """
    build = held if how == "held" else fresh
    one, two = family.style(a), family.style(b)
    truths = []
    shown = f": {slip}" if slip else ""
    for kind, where in plants:
        places = expanded("all" if where == "branches" else where, family.depth)
        places = places[:-1] if where == "branches" else places
        sites = [(one.places(each), two.places(each)) for each in places]
        if KINDS[kind].of_block:
            layers = [f"block {each.partition(' ')[2]}" for each in places]
            sites = [
                (x + one.places(each), y + two.places(each))
                for (x, y), each in zip(sites, layers, strict=True)
            ]
        if KINDS[kind].part == "start":  # roles, whose places are not in pairs
            sites = [(sum((x for x, _ in sites), ()), sum((y for _, y in sites), ()))]
        truths.append(Truth(kind, tuple(sites)))
    return Case(
        f"{how}: {family.name}, {a} and {b}{shown}",
        family.name,
        partial(build, family, a, {}),
        partial(build, family, b, {"slip": slip}),
        tuple(truths),
    )


def blocks(state: State, prefix: str) -> list[State]:
    """The states of the layers below a prefix, without it."""
    found: dict[int, State] = {}
    for name, value in state.items():
        if name.startswith(prefix + "."):
            number, _, rest = name[len(prefix) + 1 :].partition(".")
            found.setdefault(int(number), {})[rest] = value
    return [found[number] for number in sorted(found)]


def renamed(state: State, names: Mapping[str, str], prefix: str = "") -> State:
    """A state by new names; each pair maps the beginning of a known name to a new one."""
    made: State = {}
    for name, value in state.items():
        for known, new in names.items():
            if name == known or name.startswith(known + "."):
                made[prefix + new + name[len(known) :]] = value
                break
    return made


def transposed(state: State, *ends: str) -> State:
    """A state whose matrices with these ends of names are transposed."""
    return {name: value.t() if name.endswith(ends) else value for name, value in state.items()}


def neighbours(rows: Tensor, heads: int, width: int | None = None) -> Tensor:
    """Rows of queries or keys for rotated halves, in the order for rotated neighbours.

    Args:
        width: how many channels of a head are rotated; None is all.
    """
    by_head = rows.unflatten(0, (heads, -1))
    width = width or by_head.shape[1]
    turned = by_head[:, :width].unflatten(1, (2, width // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, by_head[:, width:]), 1).flatten(0, 1)


def ids(vocabulary: int, rows: int = 3, length: int = 24) -> Tensor:
    """A batch of ids."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(2, vocabulary, (rows, length), generator=generator)


def in_layer(slip: str, number: int) -> str:
    """A mistake as far as it is in a layer; without " in layer " it is in all."""
    known, _, layer = slip.partition(" in layer ")
    return known if layer in ("", str(number)) else ""
