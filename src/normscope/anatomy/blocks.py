"""Group sums into blocks: the smallest repeated module call that holds the adds.

Holders of a sum are the module calls around all of it, and the containers in their paths that are never
called themselves (an `nn.ModuleList`). A holder is repeated when another holder of the same pattern (digits
replaced) also holds a sum. Adds in a loop of the root belong to the layer that holds their parameters. Where
single-sum blocks of different kinds are inside one repeated holder (T5's sublayers), that holder is the
block. Inside a root loop (`attns[i]`, `ffs[i]`) they are joined as long as their kinds differ.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from normscope.anatomy.graph import comes_from
from normscope.anatomy.projections import owners
from normscope.anatomy.residual import Sum

Holder = tuple[str, int]
"""Module path and which call of it."""


@dataclass(eq=False)
class Group:
    """The sums of one block, in order."""

    holder: Holder
    sums: list[Sum]

    @property
    def pattern(self) -> str:
        """`pattern` of its path."""
        return pattern(self.holder[0])


def pattern(path: str) -> str:
    """`path` with its numbers replaced: the same for every layer of a stack."""
    return re.sub(r"\d+", "*", path)


def _kind(total: Sum) -> str:
    return total.branches[0].kind


def group_sums(sums: list[Sum]) -> list[Group]:
    """Blocks in order; sums that no repeated module holds are left out."""
    holders = {s: _called(s) for s in sums}
    repeated = _repeated(holders.values())
    looped = {s: _owned(s) for s in sums if repeated.isdisjoint(holders[s])}
    repeated |= _repeated(looped.values())
    all_holders = holders | looped
    choice = {s: next((h for h in all_holders[s] if h in repeated), None) for s in sums}
    held = {s: h for s, h in choice.items() if h is not None}
    if not held and sums:
        return _by_kind(sums, holders)
    _widen(held, all_holders)
    _climb(held, all_holders, repeated)
    groups = [Group(h, list(run)) for h, run in itertools.groupby(held, lambda s: held[s])]
    if looped:
        groups = _join_loop(groups, set(looped))
    return _number_calls(_join_periods(groups))


def _called(total: Sum) -> list[Holder]:
    """Holders around the add and all mixing ops of its branches, innermost first."""
    calls = [total.op.call, *(op.call for branch in total.branches for op in branch.mixers)]
    common = next(call for call in calls[0].around() if all(call in c.around() for c in calls))
    holders: list[Holder] = []
    for call in common.around():
        outer = call.parent.path if call.parent is not None else ""
        for path in _prefixes(call.path):
            if path == outer or not (path + ".").startswith(outer + "." if outer else ""):
                break
            if path == call.path or _is_element(path):
                holders.append((path, call.nth))
    return list(dict.fromkeys(holders))


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:n]) for n in range(len(parts), 0, -1))


def _owned(total: Sum) -> list[Holder]:
    """Containers of the modules whose parameters the branches use."""
    paths = [path for branch in total.branches for path in owners(branch)]
    return [(path, 0) for path in _prefixes(common_path(paths)) if _is_element(path)] if paths else []


def _is_element(path: str) -> bool:
    """True where a container is one of several: "layers.3", "stage2"."""
    return any(c.isdigit() for c in path.rpartition(".")[2])


def common_path(paths: list[str]) -> str:
    """The longest dotted path that all `paths` begin with."""
    names = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, names))


def _repeated(holders: Iterable[list[Holder]]) -> set[Holder]:
    """Holders whose pattern occurs several times; an element of a list counts as one of several."""
    found = {holder for each in holders for holder in each}
    counts = Counter(pattern(path) for path, _ in found)
    return {h for h in found if counts[pattern(h[0])] > 1 or _is_element(h[0])}


def _around(total: Sum, held: dict[Sum, Holder], holders: dict[Sum, list[Holder]]) -> list[Holder]:
    """The holders around the one that holds a sum, innermost first."""
    return holders[total][holders[total].index(held[total]) + 1 :]


def _widen(held: dict[Sum, Holder], holders: dict[Sum, list[Holder]]) -> None:
    """Replace a holder inside another sum's holder by that one (BERT's attention is a module of its own)."""
    for s in held:
        wider = [h for h in _around(s, held, holders) if h in held.values()]
        if wider:
            held[s] = wider[-1]


def _climb(held: dict[Sum, Holder], holders: dict[Sum, list[Holder]], repeated: set[Holder]) -> None:
    """Make the smallest repeated holder around neighbouring single sums of different kinds the block."""
    inside: dict[Holder, dict[Holder, list[Sum]]] = defaultdict(lambda: defaultdict(list))
    outer = {s: [h for h in _around(s, held, holders) if h in repeated] for s in held}
    for s, holder in held.items():
        for each in outer[s]:
            inside[each][holder].append(s)
    for s, around in outer.items():
        smallest = next((h for h in around if len(inside[h]) > 1), None)
        parts = inside[smallest].values() if smallest is not None else ()
        kinds = {_kind(members[0]) for members in parts}
        if smallest is not None and all(len(m) == 1 for m in parts) and len(kinds) == len(parts):
            held[s] = smallest


def _join_loop(groups: list[Group], looped: set[Sum]) -> list[Group]:
    """Join neighbouring single sums of a root loop whose modules lie in different lists."""
    joined: list[Group] = []
    for group in groups:
        if joined and _is_next_sublayer(group, joined[-1], looped):
            joined[-1].sums += group.sums
        else:
            joined.append(group)
    return joined


def _is_next_sublayer(group: Group, last: Group, looped: set[Sum]) -> bool:
    """True where a single sum continues `last` with another kind of branch from another list."""
    first = group.sums[0]
    loose = len(group.sums) == 1 and first in looped and last.sums[0] in looped
    if not loose or last.pattern == group.pattern or _kind(first) in map(_kind, last.sums):
        return False
    return comes_from(first.skip, last.sums[-1].value)


def _join_periods(groups: list[Group]) -> list[Group]:
    """Make the period of a flat list of sublayers (attention, feed-forward, attention, …) the block."""
    joined: list[Group] = []
    for _, run in itertools.groupby(groups, lambda g: g.pattern):
        members = list(run)
        kinds = [_kind(g.sums[0]) if len(g.sums) == 1 else "" for g in members]
        period = next((p for p in (2, 3) if _is_period(kinds, p)), 1)
        for start in range(0, len(members), period):
            sums = [s for g in members[start : start + period] for s in g.sums]
            joined.append(Group(members[start].holder, sums))
    return joined


def _is_period(kinds: list[str], period: int) -> bool:
    whole = len(kinds) % period == 0 and len(kinds) >= 2 * period and "" not in kinds
    return whole and len(set(kinds[:period])) == period and kinds == kinds[:period] * (len(kinds) // period)


def _by_kind(sums: list[Sum], holders: dict[Sum, list[Holder]]) -> list[Group]:
    """Groups without repeated modules: a new block begins where a kind repeats."""
    groups: list[Group] = []
    for s in sums:
        if groups and _kind(s) not in map(_kind, groups[-1].sums):
            groups[-1].sums.append(s)
        else:
            groups.append(Group(("", len(groups)), [s]))
    for group in groups:
        shared = [h for h in holders[group.sums[0]] if all(h in holders[s] for s in group.sums)]
        group.holder = shared[0] if shared else group.holder
    return _number_calls(groups)


def _number_calls(groups: list[Group]) -> list[Group]:
    """Make holders unique: the same container found again is its next call."""
    seen: set[Holder] = set()
    for group in groups:
        path, nth = group.holder
        while (path, nth) in seen:
            nth += 1
        group.holder = (path, nth)
        seen.add(group.holder)
    return groups
