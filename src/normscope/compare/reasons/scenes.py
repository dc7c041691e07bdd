"""Scenes of two walks: the steps of a branch, or of the ways in and out, of both sides together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from normscope.anatomy import Anatomy, Norm, Site
from normscope.compare.holdings import Holdings
from normscope.compare.keys import OUTPUT, OUTSIDE, Key, way_in
from normscope.compare.reasons.scene import SAME, At, Half, Scene
from normscope.compare.types import Step

Number = tuple[int, int, int]


@dataclass(frozen=True)
class Map:
    """Facts of a side without its weights, as plain data.

    Attributes:
        anatomy: the reading to which the sites belong.
        places: key of a step → where its tensor is; "whole q" is a fused projection's output.
        order: key → its number in the order of the forward.
        slots: key of a norm's output → "in", "out" or "stream".
        embedding_norm: the norm before the first block.
    """

    anatomy: Anatomy
    places: Mapping[Key, At]
    order: Mapping[Key, int]
    slots: Mapping[Key, str]
    embedding_norm: Norm | None = None

    def order_of(self, number: Number) -> list[str]:
        """Names of the steps of a branch in the order of the forward."""
        keys = [key for key in self.order if key[:3] == number]
        return [key[3] for key in sorted(keys, key=self.order.__getitem__)]

    def shared(self, number: Number) -> set[Site]:
        """Sites of the tensors of earlier branches in the block."""
        s, i, n = number
        return {at.site for key, at in self.places.items() if key[:2] == (s, i) and 0 <= key[2] < n}


def map_of(holdings: Holdings) -> Map:
    """The map of a model."""
    places: dict[Key, At] = {}
    for key, place in holdings.places.items():
        places[key] = At(place.site, place.layout, holdings.rows.get(key), bool(place.others))
        places[*key[:3], f"whole {key[3]}"] = At(place.site, place.layout)
    order = {key: place.index for key, place in holdings.places.items()}
    return Map(holdings.anatomy, places, order, holdings.norms, holdings.embedding_norm)


@dataclass(frozen=True)
class Walked:
    """A side with the steps of one forward.

    Attributes:
        map: where its steps are.
        steps: of one forward.
        parameters: the values that it ran with, by name.
        real: (B, T), true at the tokens that count; None where all do.
    """

    map: Map
    steps: Sequence[Step]
    parameters: Mapping[str, Tensor]
    real: Tensor | None = None


@dataclass(frozen=True)
class Placed:
    """A scene and its numbers: (stack, block, branch) of A and of B; -1 outside."""

    a: Number
    b: Number
    scene: Scene


def scenes_of(
    a: Walked, b: Walked, to_a: Mapping[Number, Number], tolerance: float = SAME, ids: Tensor | None = None
) -> Iterator[Placed]:
    """The scenes in the order of B's forward: the way in, the branches, the way out of each stack.

    Args:
        a, b: the sides.
        to_a: numbers of a branch, a stack or the whole of B → those of A.
        tolerance: largest relative difference of equal tensors.
        ids: the batch's token ids.
    """
    by_a, by_b = _by_number(a.steps), _by_number(b.steps)
    stacks = [s for s, *_ in to_a.values()]
    for s, stack in enumerate(b.map.anatomy.stacks):
        first = to_a.get((s, 0, 0))
        if first is not None and not first[1] and not first[2]:
            scene = _way_in(a, b, by_a, by_b, first, (s, 0, 0), tolerance, ids)
            yield Placed(way_in(first[0]), way_in(s), scene)
        for n in [(s, i, k) for i, block in enumerate(stack.blocks) for k in range(len(block.branches))]:
            if n in to_a:
                yield Placed(to_a[n], n, _scene(a, b, by_a, by_b, to_a[n], n, tolerance))
        end: Number = (s, OUTSIDE, OUTSIDE)
        if end in to_a and to_a[end][0] in stacks:
            yield Placed(to_a[end], end, _way_out(a, b, by_a, by_b, to_a[end], end, tolerance))


_Steps = dict[Number, dict[str, Step]]


def _by_number(steps: Sequence[Step]) -> _Steps:
    found: _Steps = {}
    for step in steps:
        found.setdefault(step.key[:3], {})[step.key[3]] = step
    return found


def _half(
    side: Walked, steps: Mapping[str, Step], number: Number, names: Mapping[str, Number] | None = None
) -> Half:
    """One side of a scene; `names` are steps of other numbers."""
    places = {key[3]: at for key, at in side.map.places.items() if key[:3] == number and not at.is_part}
    for name, elsewhere in (names or {}).items():
        if (*elsewhere, name) in side.map.places:
            places[name] = side.map.places[*elsewhere, name]
    return Half(
        {name: step.value for name, step in steps.items() if step.value is not None},
        side.parameters,
        places=places,
        gradients={name: step.gradient for name, step in steps.items() if step.gradient is not None},
    )


def _scene(
    a: Walked, b: Walked, by_a: _Steps, by_b: _Steps, at_a: Number, at_b: Number, tolerance: float
) -> Scene:
    halves = []
    for side, steps, at in ((a, by_a, at_a), (b, by_b, at_b)):
        branches = side.map.anatomy.stacks[at[0]].blocks[at[1]].branches
        branch, first = branches[at[2]], (at[0], at[1], 0)
        half = _half(side, steps.get(at, {}), at)
        entry = steps.get(first, {}).get("entry")
        places, tensors = dict(half.places), dict(half.steps)
        names: dict[bool, list[str]] = {True: [], False: []}
        for n, other in enumerate(branches):
            output = steps.get((*at[:2], n), {}).get("output")
            if n != at[2] and other.sum == branch.sum and output is not None and output.value is not None:
                names[n < at[2]].append(name := f"output of branch {n}")
                tensors[name], places[name] = output.value, side.map.places[output.key]
        if entry is not None:
            places["block entry"] = side.map.places[entry.key]
        halves.append(
            replace(
                half,
                steps=tensors,
                branch=branch,
                norms={f"norm {n}": norm for n, norm in enumerate(branch.norms)},
                places=places,
                block_entry=None if entry is None else entry.value,
                slots={slot: key[3] for key, slot in side.map.slots.items() if key[:3] == at},
                before=tuple(names[True]),
                after=tuple(names[False]),
            )
        )
    kind = halves[1].branch.kind if halves[1].branch is not None else "other"
    return Scene(halves[0], halves[1], kind, None, tolerance, a.real)


def _way_in(
    a: Walked,
    b: Walked,
    by_a: _Steps,
    by_b: _Steps,
    at_a: Number,
    at_b: Number,
    tolerance: float,
    ids: Tensor | None,
) -> Scene:
    halves = []
    for side, steps, at in ((a, by_a, at_a), (b, by_b, at_b)):
        known = dict(steps.get(way_in(at[0]), {}))
        known.pop(OUTPUT, None)
        if "entry" in (block := steps.get((at[0], at[1], OUTSIDE), {})):
            known["entry"] = block["entry"]
        half = _half(side, known, way_in(at[0]), {"entry": at})
        norm = side.map.embedding_norm if at[0] == 0 else None
        halves.append(half if norm is None else replace(half, norms={"embedding norm": norm}))
    return Scene(halves[0], halves[1], "embedding", ids, tolerance, a.real)


def _way_out(
    a: Walked, b: Walked, by_a: _Steps, by_b: _Steps, at_a: Number, at_b: Number, tolerance: float
) -> Scene:
    halves = []
    for side, steps, at in ((a, by_a, at_a), (b, by_b, at_b)):
        known = dict(steps.get(at, {}))
        stacks = side.map.anatomy.stacks
        if at[0] == len(stacks) - 1 and OUTPUT in steps.get(way_in(0), {}):
            known[OUTPUT] = steps[way_in(0)][OUTPUT]
        last = steps.get((at[0], len(stacks[at[0]].blocks) - 1, OUTSIDE), {})
        if "exit" in last:
            known["exit"] = last["exit"]
        half = _half(side, known, at)
        final = stacks[at[0]].final_norm
        norms = {} if final is None else {"final norm": final}
        halves.append(Half(half.steps, half.parameters, None, norms, half.places, None, half.gradients))
    return Scene(halves[0], halves[1], "head", None, tolerance, a.real)
