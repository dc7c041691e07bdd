"""The tower: each stack from its input (bottom) to its output (top), branches and norms in their places."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normscope.report.figures import svg
from normscope.report.figures.branches import BOX_X, STREAM_X, Brush, Pen, describe_join
from normscope.report.figures.fold import BRANCH, Fold
from normscope.report.figures.layout import BlockPlace, BranchPlace, Layout, StackPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import erased_class, figure, gradient_class


def stream_width(value: float | None, reference: float | None) -> float:
    """Thickness of the stream in pixels: 8 for the gradient at the top, 2 more or less a decade."""
    if value is None or not reference or not math.isfinite(value) or not math.isfinite(reference):
        return 2.0
    return 1.5 if value <= 0 else min(16.0, max(1.5, 8 + 2 * math.log10(value / reference)))


def draw_towers(
    layout: Layout, ledger: Ledger, marks: Mapping[str, str], folds: Sequence[Sequence[Fold]] = ()
) -> tuple[Markup, float]:
    """All towers side by side, and the picture's width.

    Args:
        marks: block site → severity of its worst finding.
        folds: of each stack; a run of identical blocks is drawn as one of them.
    """
    box = 62.0 if len(layout.stacks) > 1 else 84.0
    width, gap = BOX_X + box + 10, 26.0
    source = cross_source(layout)
    pieces, taps = [], []
    for i, place in enumerate(layout.stacks):
        crossed = source is not None and _is_crossed(place)
        left = i * (width + gap)
        folded = tuple(folds[i]) if folds else ()
        tower = _Tower(place, Pen(width, box, mirrored=crossed), ledger, layout, marks, folded)
        pieces.append(svg.group(tower.draw(), transform=f"translate({svg.number(left)})"))
        if crossed and source is not None:
            start = source.number * (width + gap) + STREAM_X
            taps.append(_cross(source, tower.spots, start, left - gap / 2, left + width - BOX_X - box))
    total = len(layout.stacks) * (width + gap) - gap
    label = "; ".join(f"{place.stack.name}: {len(place.blocks)} blocks" for place in layout.stacks)
    return svg.picture(total, layout.height, *taps, *pieces, label=f"Tower of {label}", css="tower"), total


def cross_source(layout: Layout) -> StackPlace | None:
    """The stack that cross-attention reads: the first one without any, where another stack has some."""
    plain = [place for place in layout.stacks if not _is_crossed(place)]
    return plain[0] if plain and len(plain) < len(layout.stacks) else None


def _is_crossed(place: StackPlace) -> bool:
    return any(branch.kind == "cross-attention" for block in place.blocks for branch in block.block.branches)


def _cross(
    source: StackPlace, drawn: Sequence[BranchPlace], start: float, rail: float, into: float
) -> Markup:
    """The encoder's output carried down between the towers to every cross-attention that is drawn."""
    spots = [spot for spot in drawn if spot.branch.kind == "cross-attention"]
    ends = [source.hidden_y, *(spot.y for spot in spots)]
    parts = [
        svg.line(start, source.hidden_y, rail, source.hidden_y, "cross-wire"),
        svg.line(rail, min(ends), rail, max(ends), "cross-wire"),
        *(svg.line(rail, spot.y, into, spot.y, "cross-wire") for spot in spots),
    ]
    return svg.group(*parts)


def _one_of(fold: Fold) -> BlockPlace:
    """The worst block of a fold in the middle of its run, as high as one that is drawn in full."""
    branches = fold.worst.block.branches
    middle = (fold.blocks[-1].top + fold.blocks[0].bottom) / 2
    bottom = middle + BRANCH * len(branches) / 2
    places = tuple(
        BranchPlace(branch, bottom - (k + 1) * BRANCH, bottom - k * BRANCH)
        for k, branch in enumerate(branches)
    )
    return BlockPlace(fold.worst.block, fold.worst.number, places[-1].top, bottom, places)


@dataclass(frozen=True)
class _Tower:
    """The drawing of one stack."""

    place: StackPlace
    pen: Pen
    ledger: Ledger
    layout: Layout
    marks: Mapping[str, str]
    folds: tuple[Fold, ...] = ()

    @property
    def spots(self) -> list[BranchPlace]:
        """The branches that are drawn: of a fold those of its worst block."""
        folded = {block.number for fold in self.folds for block in fold.blocks}
        single = [spot for b in self.place.blocks if b.number not in folded for spot in b.branches]
        return single + [spot for fold in self.folds for spot in _one_of(fold).branches]

    def draw(self) -> Markup:
        """Input, blocks, output."""
        below = self.ledger.scalar("gradient/stream", f"{self.place.stack.name}.input")
        folded = {block.number for fold in self.folds for block in fold.blocks}
        parts = [*map(self._ground, self.folds), self._input(below)]
        for block in self.place.blocks:
            here = self.ledger.scalar("gradient/stream", block.block.site)
            parts.append(self._block(block, below, here, is_folded=block.number in folded))
            below = here
        parts += map(self._fold, self.folds)
        return svg.group(*parts, self._output())

    @property
    def _top(self) -> float | None:
        """The gradient on the stream after the last block."""
        return self.ledger.scalar("gradient/stream", self.place.blocks[-1].block.site)

    def _ground(self, fold: Fold) -> Markup:
        """The panel of a fold, behind its blocks."""
        top, bottom = fold.blocks[-1].top, fold.blocks[0].bottom
        return self.pen.rect(30, top + 1, self.pen.width - 32, bottom - top - 2, "panel", rx=6.0)

    def _fold(self, fold: Fold) -> Markup:
        """The block that stands for a fold: how many there are, and which is drawn."""
        pen, place = self.pen, _one_of(fold)
        middle = BOX_X + pen.box_width / 2
        worst = f"worst: block {fold.worst.number}" if pen.box_width > 80 else f"worst: {fold.worst.number}"
        return svg.group(
            svg.tag("title", fold.words),
            *Brush(pen, self.ledger, BRANCH).branches(place),
            pen.text(middle, place.top - 7, f"{len(fold.blocks)} ×", "times", "middle"),
            pen.text(middle, place.bottom + 15, worst if fold.why else "", "num", "middle"),
            class_="fold",
        )

    def _block(
        self, place: BlockPlace, below: float | None, here: float | None, *, is_folded: bool = False
    ) -> Markup:
        pen, room, high = self.pen, self.layout.block_height, place.bottom - place.top
        gap = 3.0 if room >= 50 else 0.75 if room >= 12 else 0.0
        inner = (place.top + gap, high - 2 * gap)

        def panel(x: float, width: float, css: str, rx: float = 0.0) -> Markup:
            return pen.rect(x, inner[0], width, inner[1], css, rx=rx)

        parts = [svg.tag("title", self._block_words(place, here))]
        odd = " odd" if place.number % 2 else ""
        css = "slot" if is_folded else f"panel{odd}"
        parts.append(panel(30, pen.width - 32, css, rx=6.0 if high >= 50 else 0.0))
        parts.append(self._stream(place, below, here))
        if is_folded:
            pass
        elif room >= 8:
            parts += Brush(pen, self.ledger, self.layout.branch_height).branches(place)
        else:
            parts.append(pen.rect(BOX_X, place.top, pen.box_width, max(1.0, high - 0.6), "box attn"))
        every = next((n for n in (1, 2, 5, 10, 20, 50) if n * high >= 20), 100)
        if place.number % every == 0:
            parts.append(pen.text(26, (place.top + place.bottom) / 2 + 3.5, place.number, "num", "end"))
        site = place.block.site
        if self.ledger.trial is not None:
            last = self.ledger.trained(self.place.blocks[-1].block.site)
            parts.append(panel(30, 4, f"after {gradient_class(self.ledger.trained(site), last)}"))
        if site in self.marks:
            parts.append(panel(2, 3, f"flag {self.marks[site]}"))
        return self._row(str(place.number), *parts, css="rung" if is_folded else "row")

    def _row(self, name: str, *parts: Markup, css: str = "row") -> Markup:
        return svg.group(*parts, class_=css, data_r=f"{self.place.number}:{name}")

    def _stream(self, place: BlockPlace, below: float | None, here: float | None) -> Markup:
        x, bottom, top = self.pen.x(STREAM_X), place.bottom, place.top
        css = gradient_class(here, self._top)
        if css == "gx":
            return svg.line(x, bottom, x, top, "stream-gap")
        low, high = stream_width(below, self._top) / 2, stream_width(here, self._top) / 2
        corners = ((x - low, bottom), (x - high, top), (x + high, top), (x + low, bottom))
        points = " ".join(f"{svg.number(a)},{svg.number(b)}" for a, b in corners)
        return svg.tag("polygon", points=points, class_=f"stream {css}")

    def _input(self, here: float | None) -> Markup:
        x, floor, width = self.pen.x(STREAM_X), self.place.floor, stream_width(here, self._top)
        css = gradient_class(here, self._top)
        if css == "gx":
            body = svg.line(x, floor + 20, x, floor, "stream-gap")
        else:
            body = svg.rect(x - width / 2, floor, width, 20, f"stream {css}")
        return self._row("in", self._end_title("input of the first block", "input"), body)

    def _output(self) -> Markup:
        pen, y, stack = self.pen, self.place.ceiling, self.place.stack
        x = pen.x(STREAM_X)
        several = len(self.layout.stacks) > 1
        out, into = (f"{svg.clip(stack.name, 12)} {end}" for end in ("out", "in"))
        arrow = f"M{svg.number(x - 5)} {svg.number(y - 36)} l5 -9 l5 9 z"
        parts = [
            self._end_title("output", "hidden"),
            svg.line(x, y, x, y - 36, "stream-plain"),
            svg.tag("path", d=arrow, class_="tip"),
            pen.text(STREAM_X + 14, y - 36, out if several else "output", "label"),
            pen.text(STREAM_X + 14, self.place.floor + 18, into if several else "input", "label"),
        ]
        if self.ledger.trial is not None:
            parts.append(pen.text(38, y - 4, f"step {self.ledger.trial.step}", "scale", "end"))
        if stack.final_norm is None:
            parts.append(pen.text(STREAM_X + 14, y - 16, "no final norm", "label soft"))
        else:
            erased = self.ledger.scalar("gradient/erased", stack.final_norm.path)
            parts.append(pen.rect(STREAM_X - 11, y - 22, 22, 4, f"norm {erased_class(erased)}", rx=1.5))
            parts.append(pen.text(STREAM_X + 14, y - 16, "final norm", "label"))
        return self._row("out", *parts)

    def _end_title(self, words: str, end: str) -> Markup:
        """Tooltip at an end of the stack, with the figures of the stream there."""
        name = self.place.stack.name
        quantities = ("stream/rms", "stream/diversity", "gradient/stream")
        lines = [self.ledger.words(quantity, f"{name}.{end}") for quantity in quantities]
        return svg.tag("title", "\n".join(filter(None, [f"{name}: {words}", *lines])))

    def _block_words(self, place: BlockPlace, here: float | None) -> str:
        site, top = place.block.site, self._top
        lines = [f"{self.place.stack.name} · block {place.number} · {site}"]
        if here is not None:
            share = f", {figure(here / top, 3)} × the top" if top else ""
            lines.append(f"gradient/stream  {figure(here, 6)}{share}")
        lines += [self.ledger.words(q, site) for q in ("gradient/block", "stream/rms", "stream/diversity")]
        for branch in place.block.branches:
            lines.append(f"{branch.kind} · {branch.site}")
            lines.append(f"  {branch.placement} · {describe_join(branch)}")
            for norm in branch.norms:
                erased = self.ledger.erased(branch, norm)
                if erased is not None:
                    lines.append(f"  {norm.path} erases {figure(100 * erased, 3)} %")
        return "\n".join(filter(None, lines))
