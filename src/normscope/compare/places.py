"""Places of a comparison: rows of the aligned models, and the sites of differences folded over them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from normscope.compare.types import Difference, Pair
from normscope.report.sites import compress, number_runs

WHOLE = "the whole model"


@dataclass(frozen=True)
class Row:
    """Blocks that belong together, or one that only a side has.

    Attributes:
        stack: number of its stack.
        pair: the two blocks.
        a, b: number of the block in the stack of each side; None where the side lacks it.
    """

    stack: int
    pair: Pair
    a: int | None
    b: int | None

    @property
    def number(self) -> str:
        """Number of the block: "3", "3 | 5" where the sides count differently, "– | 5" where A lacks it."""
        if self.a == self.b:
            return str(self.a)
        return " | ".join("–" if number is None else str(number) for number in (self.a, self.b))


@dataclass(frozen=True)
class Spot:
    """Part of the rows that a site stands for.

    Attributes:
        stack: number of the stack; None for the whole model, or where the site is in no stack.
        row: number of the row in its stack; None for a site outside of the blocks.
        branch: number of the pair of branches in the row; None for the block itself.
    """

    stack: int | None = None
    row: int | None = None
    branch: int | None = None


@dataclass(frozen=True)
class Rows:
    """The aligned models."""

    whole: Pair

    @cached_property
    def stacks(self) -> tuple[tuple[Row, ...], ...]:
        """The rows of each stack, from the input on."""
        return tuple(tuple(_rows(number, stack)) for number, stack in enumerate(self.whole.parts))

    def stack_name(self, number: int) -> str:
        """Name of a stack, as A has it."""
        pair = self.whole.parts[number]
        place = pair.a or pair.b
        return place.name if place is not None and place.name else f"stack {number}"

    def spot(self, a: str | None, b: str | None) -> Spot:
        """The spot of a pair of sites, found in A, else in B."""
        for site, known in ((a, self._known[0]), (b, self._known[1])):
            if site and (found := _find(site, known)) is not None:
                return found
        return Spot()

    def spots(self, difference: Difference) -> list[Spot]:
        """The spots of a difference, without repetitions."""
        return list(dict.fromkeys(self.spot(a, b) for a, b in difference.sites))

    @cached_property
    def _known(self) -> tuple[dict[str, Spot], dict[str, Spot]]:
        """Name → spot of each side; the first one where a path is shared."""
        known: tuple[dict[str, Spot], dict[str, Spot]] = ({}, {})

        def note(pair: Pair, spot: Spot) -> None:
            for place, names in zip((pair.a, pair.b), known, strict=True):
                if place is not None and place.name:
                    names.setdefault(place.name, spot)

        for i, rows in enumerate(self.stacks):
            for k, row in enumerate(rows):
                note(row.pair, Spot(i, k))
                for n, pair in enumerate(row.pair.parts):
                    note(pair, Spot(i, k, n))
        for i, pair in enumerate(self.whole.parts):  # last: a block may be called as its stack
            note(pair, Spot(i))
        return known

    def fold(self, difference: Difference) -> str:
        """The places of a difference in a few words: "attention of blocks 0–11", "transformer.ln_f"."""
        if all(not a and not b for a, b in difference.sites):
            return WHOLE
        spots = self.spots(difference)
        if all(self._is_stack(*each) for each in difference.sites):
            names = [self.stack_name(spot.stack) for spot in spots if spot.stack is not None]
            return (
                f"stack{'s' * (len(names) > 1)} {', '.join(names)}" if len(self.stacks) > 1 else "the stack"
            )
        if any(spot.row is None for spot in spots):
            return sites_of(difference)
        found = [each for i in range(len(self.stacks)) if (each := self._in_blocks(i, difference))[1]]
        shared = {kinds for kinds, _ in found}
        if len(shared) == 1:
            (kinds,) = shared
            words = f"{kinds} of " * bool(kinds) + ", ".join(blocks for _, blocks in found)
        else:
            words = "; ".join(f"{kinds} of {blocks}" if kinds else blocks for kinds, blocks in found)
        return ", ".join(filter(None, [words, self._leaf(difference)]))

    def _leaf(self, difference: Difference) -> str:
        """The module or parameter inside of blocks or branches, where all have the same: "ln_1 | norm1"."""
        leaves = []
        for side, sites in enumerate(paths_of(difference)):
            found = {_inside(site, self._known[side]) for site in sites}
            leaves.append(found.pop() if len(found) == 1 else "")
        return " | ".join(dict.fromkeys(filter(None, leaves)))

    def _is_stack(self, a: str | None, b: str | None) -> bool:
        return any(
            (pair.a and pair.a.name) == a and (pair.b and pair.b.name) == b for pair in self.whole.parts
        )

    def _in_blocks(self, stack: int, difference: Difference) -> tuple[str, str]:
        """Kinds of branches, "" for all, and blocks of a stack: "attention", "blocks 2–3 of B"."""
        numbers: dict[str, set[int]] = {"": set(), " of A": set(), " of B": set()}
        rows: set[int] = set()
        kinds: dict[str, None] = {}
        for a, b in difference.sites:
            spot = self.spot(a, b)
            if spot.stack != stack or spot.row is None:
                continue
            row = self.stacks[stack][spot.row]
            number, ending = (row.b, " of B") if not a else (row.a, "" if b else " of A")
            numbers[ending] |= set() if number is None else {number}
            rows.add(spot.row)
            kinds[self._kind(spot)] = None
        named = ", ".join(_numbered(sorted(found), ending) for ending, found in numbers.items() if found)
        present = {
            self._kind(Spot(stack, row, n))
            for row in rows
            for n in range(len(self.stacks[stack][row].pair.parts))
        }
        is_all = "" in kinds or (present == set(kinds) and len(present) > 1)
        name = f"{self.stack_name(stack)} " if len(self.stacks) > 1 else ""
        return "" if is_all else " and ".join(kinds), f"{name}{named}" if named else ""

    def _kind(self, spot: Spot) -> str:
        if spot.stack is None or spot.row is None or spot.branch is None:
            return ""
        pair = self.stacks[spot.stack][spot.row].pair.parts[spot.branch]
        place = pair.a or pair.b
        return str(place.facts.get("kind", "")) if place is not None else ""


def sites_of(difference: Difference) -> str:
    """The sites as ranges: "h.0.attn…h.3.attn in A, layers.0.attn…layers.3.attn in B", or once for both."""
    a, b = (compress(each) for each in paths_of(difference))
    if a == b or not a or not b:
        return a or b or WHOLE
    return f"{a} in A, {b} in B"


def paths_of(difference: Difference) -> tuple[list[str], list[str]]:
    """The sites of A and those of B."""
    return [a for a, _ in difference.sites if a], [b for _, b in difference.sites if b]


def _rows(number: int, stack: Pair) -> Iterator[Row]:
    a = b = 0
    for pair in stack.parts:
        yield Row(number, pair, None if pair.a is None else a, None if pair.b is None else b)
        a, b = a + (pair.a is not None), b + (pair.b is not None)


def _numbered(numbers: Sequence[int], ending: str) -> str:
    return f"block{'s' if len(numbers) > 1 else ''} {number_runs(numbers)}{ending}" if numbers else ""


def _find(site: str, known: dict[str, Spot]) -> Spot | None:
    """The spot of the innermost known place that holds `site`; a call ("layer.attn@3") is kept."""
    name = _holder(site, known)
    return None if name is None else known[name]


def _holder(site: str, known: dict[str, Spot]) -> str | None:
    path, at, call = site.partition("@")
    for prefix in _prefixes(path):
        for name in (f"{prefix}{at}{call}", prefix):
            if name in known:
                return name
    return None


def _inside(site: str, known: dict[str, Spot]) -> str:
    """The end of `site` that is inside of a known block or branch; "" for the place itself."""
    held = _holder(site, known)
    if held is None or known[held].row is None:
        return ""
    return site.partition("@")[0][len(held.partition("@")[0]) :].lstrip(".")


def _prefixes(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
