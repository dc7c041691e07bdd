"""Group sums into blocks: the smallest repeated module call that holds the adds.

Each sum has places it may belong to: the module calls around all of it, and the containers in their paths
that are never called themselves (an `nn.ModuleList`). A place is repeated when another place of the same
pattern (digits replaced) holds a sum, too. Where the adds are written in a loop of the root, the parameters'
modules say which layer they belong to. Single-sum blocks of different kinds inside one repeated place (T5's
sublayers) make that place the block; inside a root loop (`attns[i]`, `ffs[i]`) they are joined as long as
kinds differ.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from normscope.anatomy.branches import Limb
from normscope.anatomy.calls import Call
from normscope.anatomy.graph import Op, comes_from
from normscope.anatomy.residual import Sum

Place = tuple[str, int]
"""Module path and which call of it."""


@dataclass(eq=False)
class Group:
    """The sums of one block, in order."""

    place: Place
    sums: list[Sum]


def pattern(path: str) -> str:
    """`path` with its numbers replaced: the same for every layer of a stack."""
    return re.sub(r"\d+", "*", path)


def group_sums(sums: list[Sum], limbs: dict[Sum, list[Limb]], owners: dict[Op, str]) -> list[Group]:
    """Blocks in order; sums that no repeated place holds are left out. `owners`: mixing op → module path."""
    called = {s: _called_places(s, limbs[s]) for s in sums}
    places = dict(called)
    repeated = _repeated(places.values())
    looped = {s for s in sums if not any(p in repeated for p in places[s])}
    for s in looped:
        places[s] = _owned_places(s, limbs[s], owners)
    repeated |= _repeated(places[s] for s in looped)
    choice = {s: next((p for p in places[s] if p in repeated), None) for s in sums}
    held = {s: p for s, p in choice.items() if p is not None}
    _widen(held, places)
    _climb(held, places, repeated, limbs)
    if not held and sums:
        return _by_kind(sums, limbs, called)
    groups: list[Group] = []
    for s in sums:
        if s not in held:
            continue
        if groups and groups[-1].place == held[s]:
            groups[-1].sums.append(s)
        else:
            groups.append(Group(held[s], [s]))
    if looped:
        groups = _join_loop(groups, looped, limbs)
    return _number_calls(_join_periods(groups, limbs))


def _called_places(total: Sum, limbs: list[Limb]) -> list[Place]:
    """Places around the add and all that its branches mix with, innermost first."""
    calls = [total.op.call, *(op.call for limb in limbs for op in limb.mixers)]
    common = calls[0]
    for call in calls[1:]:
        common = _common(common, call)
    places: list[Place] = []
    for call in common.around():
        outer = call.parent.path if call.parent is not None else ""
        for path in _prefixes(call.path):
            if path == outer or not (path + ".").startswith(outer + "." if outer else ""):
                break
            if path == call.path or _is_element(path):
                places.append((path, call.nth))
    return list(dict.fromkeys(places))


def _common(a: Call, b: Call) -> Call:
    around = set(map(id, a.around()))
    return next(call for call in b.around() if id(call) in around)


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:n]) for n in range(len(parts), 0, -1))


def _owned_places(total: Sum, limbs: list[Limb], owners: dict[Op, str]) -> list[Place]:
    """Containers of the modules whose parameters the branches mix with."""
    paths = [owners[op] for limb in limbs for op in limb.mixers if op in owners]
    return [(path, 0) for path in _prefixes(common_path(paths)) if _is_element(path)] if paths else []


def _is_element(path: str) -> bool:
    """Whether a container is one of several: "layers.3", "stage2"."""
    return any(c.isdigit() for c in path.rpartition(".")[2])


def common_path(paths: list[str]) -> str:
    """The longest dotted path that all `paths` begin with."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(p) > shared for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return ".".join(parts[0][:shared])


def _repeated(places: Iterable[list[Place]]) -> set[Place]:
    """Places of whose pattern there are several; an element of a list counts as one of several."""
    found = {place for each in places for place in each}
    counts = Counter(pattern(path) for path, _ in found)
    return {p for p in found if counts[pattern(p[0])] > 1 or _is_element(p[0])}


def _widen(held: dict[Sum, Place], places: dict[Sum, list[Place]]) -> None:
    """A place inside another sum's place gives way to it (BERT: attention has a module of its own)."""
    for s, place in held.items():
        around = places[s][places[s].index(place) + 1 :]
        wider = [p for p in around if p in set(held.values())]
        if wider:
            held[s] = wider[-1]


def _climb(
    held: dict[Sum, Place], places: dict[Sum, list[Place]], repeated: set[Place], limbs: dict[Sum, list[Limb]]
) -> None:
    """Single sums of different kinds side by side: the smallest repeated place around them is the block."""
    inside: dict[Place, dict[Place, list[Sum]]] = defaultdict(lambda: defaultdict(list))
    outer_of: dict[Sum, list[Place]] = {}
    for s, place in held.items():
        outer_of[s] = [p for p in places[s][places[s].index(place) + 1 :] if p in repeated]
        for outer in outer_of[s]:
            inside[outer][place].append(s)
    for s, around in outer_of.items():
        smallest = next((p for p in around if len(inside[p]) > 1), None)
        if smallest is None:
            continue
        parts = inside[smallest].values()
        kinds = [limbs[members[0]][0].kind for members in parts]
        if all(len(m) == 1 for m in parts) and len(set(kinds)) == len(kinds):
            held[s] = smallest


def _join_loop(groups: list[Group], looped: set[Sum], limbs: dict[Sum, list[Limb]]) -> list[Group]:
    """Join neighbouring single sums of a root loop whose modules lie in different lists."""
    joined: list[Group] = []
    for group in groups:
        if joined and _is_next_sublayer(group, joined[-1], looped, limbs):
            joined[-1].sums += group.sums
        else:
            joined.append(group)
    return joined


def _is_next_sublayer(group: Group, last: Group, looped: set[Sum], limbs: dict[Sum, list[Limb]]) -> bool:
    """Whether a single sum continues the stream of `last`, from another list, with another kind of branch."""
    first = group.sums[0]
    loose = len(group.sums) == 1 and first in looped and last.sums[0] in looped
    if not loose or pattern(last.place[0]) == pattern(group.place[0]):
        return False
    new = limbs[first][0].kind not in {limbs[s][0].kind for s in last.sums}
    return new and comes_from(first.skip, last.sums[-1].value)


def _join_periods(groups: list[Group], limbs: dict[Sum, list[Limb]]) -> list[Group]:
    """A flat list of sublayers, attention, feed-forward, attention, …: its period is the block."""
    joined: list[Group] = []
    for _, run in itertools.groupby(groups, lambda g: pattern(g.place[0])):
        members = list(run)
        kinds = [limbs[g.sums[0]][0].kind if len(g.sums) == 1 else "" for g in members]
        period = next((p for p in (2, 3) if _is_period(kinds, p)), 1)
        for start in range(0, len(members), period):
            sums = [s for g in members[start : start + period] for s in g.sums]
            joined.append(Group(members[start].place, sums))
    return joined


def _is_period(kinds: list[str], period: int) -> bool:
    whole = len(kinds) % period == 0 and len(kinds) >= 2 * period and "" not in kinds
    return whole and len(set(kinds[:period])) == period and kinds == kinds[:period] * (len(kinds) // period)


def _by_kind(sums: list[Sum], limbs: dict[Sum, list[Limb]], places: dict[Sum, list[Place]]) -> list[Group]:
    """No module is repeated: a new block begins where a kind comes again."""
    groups: list[Group] = []
    for s in sums:
        kind = limbs[s][0].kind
        if groups and kind not in {limbs[t][0].kind for t in groups[-1].sums}:
            groups[-1].sums.append(s)
        else:
            groups.append(Group(("", len(groups)), [s]))
    for group in groups:
        shared = [p for p in places[group.sums[0]] if all(p in places[s] for s in group.sums)]
        group.place = shared[0] if shared else group.place
    return _number_calls(groups)


def _number_calls(groups: list[Group]) -> list[Group]:
    """Make places unique: the same container found again is its next call."""
    seen: set[Place] = set()
    for group in groups:
        path, nth = group.place
        while (path, nth) in seen:
            nth += 1
        group.place = (path, nth)
        seen.add(group.place)
    return groups
