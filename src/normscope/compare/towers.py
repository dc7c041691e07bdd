"""The two models as towers, line beside line: what the page draws and says of each row of blocks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from normscope.anatomy import Block, Branch, Norm, Site
from normscope.anatomy.types import Scale
from normscope.compare.facts import FACTS, differing, in_words, name_of
from normscope.compare.places import Row, Rows, Spot
from normscope.compare.types import Diff, Difference, Pair, Place
from normscope.compare.walked import tolerance_of, walk_of
from normscope.compare.words import first_parting
from normscope.report.figures import svg
from normscope.report.figures.branches import (
    BOX_X,
    KIND_CSS,
    STREAM_X,
    Brush,
    Pen,
    describe_join,
    describe_norms,
)
from normscope.report.figures.fold import BRANCH, LEAST
from normscope.report.figures.layout import BlockPlace, BranchPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import figure
from normscope.report.sites import number_runs

BOX = 84.0
WIDTH = BOX_X + BOX + 10
END = 56.0
"""Height of an end of a stack, in pixels."""
_NORMS = {"pre": 1, "post": 1, "res-post": 1, "peri": 2}
"""Norms that are drawn of a placement."""
_EMBEDDING = ("embedding", "position", "context")
"""Beginnings of the names of facts that belong to the input of a stack."""
_SOMEWHERE = Site("", 0, "", 0)

Key = tuple[int | None, int | None]
"""Stack and row; (stack, None) is the stack itself, (stack, INPUT) its input, (None, None) the model."""
INPUT = -1


@dataclass(frozen=True)
class Facts:
    """Facts of two places that belong together.

    Attributes:
        title: "attention", or "" for a block, a stack or the model.
        changed: (name, value in A, value in B) of the facts that differ.
        same: "norm layernorm, placement pre": the facts that agree.
    """

    title: str
    changed: tuple[tuple[str, str, str], ...]
    same: str


@dataclass(frozen=True)
class Line:
    """A line of the towers: the model, an end of a stack, a row of blocks, or rows that are alike.

    Attributes:
        id: its name in the page.
        title: "block 3", "blocks 4–56", "input".
        short: the same for the narrow column between the towers.
        count: number of rows that it stands for.
        a, b: the two drawings; empty for the model.
        lacks: the side that lacks it, "" where both have it.
        differences: the differences at it.
        facts: the facts of its places.
        relative: largest relative difference of the walk in it; None where nothing was compared.
        is_apart: whether that is above the tolerance.
        is_first: whether the functions part in it first.
    """

    id: str
    title: str
    short: str
    count: int
    a: Markup
    b: Markup
    lacks: str
    differences: tuple[Difference, ...]
    facts: tuple[Facts, ...]
    relative: float | None
    is_apart: bool
    is_first: bool

    @property
    def names(self) -> list[str]:
        """Names of its differences."""
        return list(dict.fromkeys(each.name for each in self.differences))

    @property
    def size(self) -> str:
        """The largest relative difference in words."""
        return "" if self.relative is None else figure(self.relative, 2)


@dataclass(frozen=True)
class Tower:
    """The lines of a stack, from its output down to its input; `name` is empty where there is one stack."""

    name: str
    lines: tuple[Line, ...]


class Towers:
    """The lines of a comparison, and the line of each difference."""

    def __init__(self, diff: Diff) -> None:
        self._rows, self._tolerance = Rows(diff.rows), tolerance_of(diff) or 0.0
        self._differences: dict[Key, list[Difference]] = {}
        self._sizes: dict[Key, float] = {}
        self._keys: dict[int, Key] = {}
        self._ids: dict[Key, str] = {}
        for each in diff.differences:
            keys = list(dict.fromkeys(_key(each, spot) for spot in self._rows.spots(each)))
            self._keys[id(each)] = keys[0] if keys else (None, None)
            for key in keys:
                self._differences.setdefault(key, []).append(each)
        first = first_parting(diff)
        self._first = None if first is None else self._keys[id(first)]
        for step in walk_of(diff):
            spot = self._rows.spot(step.a, step.b)
            if step.relative is not None and spot.stack is not None:
                key = (spot.stack, spot.row)
                self._sizes[key] = _larger(self._sizes.get(key, 0.0), step.relative)
        self.model = self._line([(None, None)], diff.rows, ("the whole model", ""), ("", ""))
        self.stacks = tuple(map(self._tower, range(len(diff.rows.parts))))

    def id_of(self, difference: Difference) -> str:
        """The line of a difference's first site."""
        return self._ids[self._keys[id(difference)]]

    def _tower(self, number: int) -> Tower:
        pair, name = self._rows.whole.parts[number], self._rows.stack_name(number)
        several = len(self._rows.stacks) > 1
        output = self._line([(number, None)], pair, ("output", ""), _pictures(pair, _output))
        runs = [list(run) for _, run in groupby(self._rows.stacks[number], key=self._look)]
        folded = [run for long in runs for run in ([long] if len(long) >= LEAST else [[row] for row in long])]
        lines = [self._of_run(run) for run in reversed(folded)]
        start = self._line([(number, INPUT)], pair, ("input", ""), _pictures(pair, _input))
        return Tower(name if several else "", (output, *lines, start))

    def _look(self, row: Row) -> Any:
        """The properties that rows must share to be one line."""
        key = (row.stack, self._number(row))
        if key == self._first:
            return key
        sides = [(place is None, repr(_facts_inside(place))) for place in (row.pair.a, row.pair.b)]
        found = [id(each) for each in self._differences.get(key, ())]
        return sides, found, self._is_apart(key)

    def _number(self, row: Row) -> int:
        return next(i for i, each in enumerate(self._rows.stacks[row.stack]) if each is row)

    def _of_run(self, run: Sequence[Row]) -> Line:
        keys: list[Key] = [(row.stack, self._number(row)) for row in run]
        return self._line(keys, run[0].pair, _numbers(run), _pictures(run[0].pair, _block))

    def _line(
        self,
        keys: Sequence[Key],
        pair: Pair,
        title: tuple[str, str],
        pictures: tuple[Markup | str, Markup | str],
    ) -> Line:
        """The line of some rows that are alike; `pair` is the first of them."""
        name = "-".join("model" if part is None else str(part) for part in keys[0])
        line_id = f"row-{name}"
        self._ids |= dict.fromkeys(keys, line_id)
        sizes = [self._sizes[key] for key in keys if key in self._sizes]
        found = {id(each): each for key in keys for each in self._differences.get(key, ())}
        return Line(
            id=line_id,
            title=title[0],
            short=title[1],
            count=len(keys),
            a=Markup(pictures[0]),
            b=Markup(pictures[1]),
            lacks="A" if pair.a is None else "B" if pair.b is None else "",
            differences=tuple(found.values()),
            facts=tuple(_facts_of(pair, keys[0][1])),
            relative=max(sizes, key=lambda size: _larger(size, 0.0), default=None),
            is_apart=any(map(self._is_apart, keys)),
            is_first=self._first in keys,
        )

    def _is_apart(self, key: Key) -> bool:
        return key in self._sizes and not self._sizes[key] <= self._tolerance


def _key(difference: Difference, spot: Spot) -> Key:
    is_at_input = (
        spot.stack is not None and spot.row is None and difference.name.startswith((*_EMBEDDING, "init"))
    )
    return spot.stack, INPUT if is_at_input else spot.row


def _larger(one: float, other: float) -> float:
    """The larger of two sizes; NaN is larger than all."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _numbers(run: Sequence[Row]) -> tuple[str, str]:
    """ "blocks 4–56" and "4–56"; both counts where the sides count differently."""
    sides = [[number for row in run if (number := getattr(row, side)) is not None] for side in ("a", "b")]
    shown = [number_runs(side) or "–" for side in sides]
    short = " | ".join(dict.fromkeys(shown))
    noun = "blocks" if len(run) > 1 else "block"
    if "–" in shown:
        return f"{noun} {shown[0]} of A" if sides[0] else f"{noun} {shown[1]} of B", short
    return f"{noun} {shown[0]}" + (f" ({shown[1]} of B)" if shown[0] != shown[1] else ""), short


def _facts_inside(place: Place | None) -> list[Any]:
    return [] if place is None else [dict(place.facts), *(dict(part.facts) for part in place.parts)]


def _facts_of(pair: Pair, row: int | None) -> Iterator[Facts]:
    """Facts of the pair at a line; for a row of blocks also of the branches inside."""
    is_block = row is not None and row != INPUT
    for each in (pair, *(pair.parts if is_block else ())):
        place = each.a or each.b
        if place is None:
            continue
        a, b = (_own(side, row) for side in (each.a, each.b))
        names = differing(a, b)
        changed = tuple((name_of(name), in_words(name, a[name]), in_words(name, b[name])) for name in names)
        title = str(place.facts.get("kind", "")) if each is not pair else ""
        known = {name: a[name] for name in a if name in b and name not in names}
        if each.a is None or each.b is None:
            title = f"{title} only in {'A' if each.a else 'B'}".strip()
            known = a or b
        same = ", ".join(
            f"{name_of(name)} {in_words(name, known[name])}"
            for name in FACTS
            if known.get(name) is not None and name != "kind"
        )
        if changed or same:
            yield Facts(title, changed, same)


def _own(place: Place | None, row: int | None) -> dict[str, Any]:
    """The facts of a place at a line; a stack's embedding is at its input, the rest at its output."""
    facts = {} if place is None else dict(place.facts)
    if place is None or place.level != "stack":
        return facts
    return {name: facts[name] for name in facts if name.startswith(_EMBEDDING) == (row == INPUT)}


def _pictures(pair: Pair, draw: Any) -> tuple[Markup, Markup]:
    """A with its stream on the right, B with its stream on the left."""
    return draw(pair, pair.a, "A", Pen(WIDTH, BOX, mirrored=True)), draw(
        pair, pair.b, "B", Pen(WIDTH, BOX, mirrored=False)
    )


def _gap(side: str, height: float, pen: Pen) -> Markup:
    """Nothing in this side: the stream passes by."""
    x = pen.x(STREAM_X)
    parts = [
        svg.line(x, 0, x, height, "stream-gap"),
        pen.rect(30, 3, pen.width - 32, height - 6, "missing", rx=6.0),
        pen.text(BOX_X + BOX / 2, height / 2 + 4, f"not in {side}", "kind", "middle"),
    ]
    return svg.picture(pen.width, height, *parts, label=f"{side}: nothing here", css="side")


def _block(pair: Pair, place: Place | None, side: str, pen: Pen) -> Markup:
    height = BRANCH * max(1, len(pair.parts)) + 8
    if place is None:
        return _gap(side, height, pen)
    x = pen.x(STREAM_X)
    marks, spots, words = [], [], []
    is_parallel = place.facts.get("parallel") is True
    for n, each in enumerate(pair.parts):
        top = height - 4 - (n + 1) * BRANCH
        branch, other = (each.a, each.b) if side == "A" else (each.b, each.a)
        if branch is None:
            marks.append(pen.rect(BOX_X - 8, top + 3, BOX + 12, BRANCH - 6, "missing", rx=5.0))
            words.append("a branch is missing")
            continue
        if other is None or differing(branch.facts, other.facts):
            marks.append(pen.rect(34, top + 1, pen.width - 38, BRANCH - 2, "changed", rx=4.0))
        drawn = _branch(branch, 0 if is_parallel else n)
        spots.append(BranchPlace(drawn, top, top + BRANCH))
        words.append(f"{drawn.kind}, {describe_norms(drawn)}, {describe_join(drawn)}")
    spot = BlockPlace(Block(place.name, 0, (), _SOMEWHERE, _SOMEWHERE), 0, 4.0, height - 4, tuple(spots))
    parts = [
        pen.rect(30, 1, pen.width - 32, height - 2, "panel", rx=6.0),
        *marks,
        svg.line(x, height, x, 0, "stream-plain"),
        *Brush(pen, Ledger(()), BRANCH).branches(spot),
    ]
    label = f"{side}, {place.name}: {'; '.join(words) or 'no branch'}"
    return svg.picture(pen.width, height, svg.tag("title", label), *parts, label=label, css="side")


def _branch(place: Place, number: int) -> Branch:
    """A branch as the drawings of reports take it; facts that are unknown are drawn as plain."""
    facts = place.facts
    kind, placement = str(facts.get("kind")), str(facts.get("placement"))
    norms = _NORMS.get(placement, 0)
    return Branch(
        kind=kind if kind in KIND_CSS else "other",  # type: ignore[arg-type]
        placement=placement if norms else "none",  # type: ignore[arg-type]
        norm=str(facts.get("norm") or "none"),
        path=place.name,
        call=0,
        join=str(facts.get("join") or "add"),
        stream_scale=_scale(facts.get("stream_scale")),
        branch_scale=_scale(facts.get("branch_scale")),
        scheme=None,
        entry=Site("", 0, "entry", number),
        output=Site("", 0, "output", number),
        sum=Site("", 0, "sum", number),
        norms=(Norm("norm", "", _SOMEWHERE, _SOMEWHERE, None, None),) * norms,
    )


def _scale(value: Any) -> Scale:
    if isinstance(value, str):
        return "learnt"
    return float(value) if isinstance(value, int | float) else None


def _output(pair: Pair, place: Place | None, side: str, pen: Pen) -> Markup:
    """The upper end of a stack: its final norm, and the arrow out."""
    if place is None:
        return _gap(side, END, pen)
    x, middle = pen.x(STREAM_X), END / 2
    arrow = f"M{svg.number(x - 5)} 11 l5 -9 l5 9 z"
    parts = [svg.line(x, END, x, 11, "stream-plain"), svg.tag("path", d=arrow, class_="tip")]
    parts.append(pen.text(STREAM_X + 16, 13, "output", "label soft"))
    words = "final norm unknown"
    if "final_norm" in place.facts:
        norm = place.facts["final_norm"]
        words = "no final norm" if norm is None else "final norm"
        other = pair.b if side == "A" else pair.a
        if other is not None and any(
            name.startswith("final") for name in differing(place.facts, other.facts)
        ):
            parts.insert(0, pen.rect(24, middle - 9, pen.width - 28, 24, "changed", rx=4.0))
        if norm is not None:
            parts.append(pen.rect(STREAM_X - 11, middle + 1, 22, 4, "norm gx", rx=1.5))
        parts.append(pen.text(STREAM_X + 16, middle + 7, words, "label" if norm else "label soft"))
    return svg.picture(pen.width, END, *parts, label=f"{side}: output, {words}", css="side")


def _input(pair: Pair, place: Place | None, side: str, pen: Pen) -> Markup:
    """The lower end of a stack."""
    if place is None:
        return _gap(side, 30.0, pen)
    x, other = pen.x(STREAM_X), pair.b if side == "A" else pair.a
    parts = [svg.line(x, 0, x, 24, "stream-plain"), pen.text(STREAM_X + 16, 20, "input", "label soft")]
    facts = [_own(each, INPUT) for each in (place, other) if each is not None]
    if len(facts) == 2 and differing(*facts):
        parts.insert(0, pen.rect(24, 4, pen.width - 28, 24, "changed", rx=4.0))
    return svg.picture(pen.width, 30.0, *parts, label=f"{side}: input", css="side")
