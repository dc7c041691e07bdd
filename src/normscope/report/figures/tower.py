"""The tower: each stack from its input (bottom) to its output (top), branches and norms in their places."""

import math
from dataclasses import dataclass

from markupsafe import Markup

from normscope.anatomy import Block, Branch, Norm
from normscope.report.figures import svg
from normscope.report.figures.layout import BlockPlace, BranchPlace, Layout, StackPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import erased_class, figure, gradient_class

KIND_WORDS = {
    "attention": "attention",
    "cross-attention": "cross-attention",
    "feed-forward": "feed-forward",
    "other": "other",
}
KIND_SHORT = {
    "attention": "attention",
    "cross-attention": "cross-attn",
    "feed-forward": "feed-fwd",
    "other": "other",
}
KIND_CSS = {"attention": "attn", "cross-attention": "cross", "feed-forward": "ffn", "other": "other"}
STREAM_X, NORM_X, BOX_X = 46.0, 62.0, 76.0
FINE = 13.0
"""Branches lower than this many pixels are drawn without outlines and words."""


@dataclass(frozen=True)
class Pen:
    """Where x lies: a mirrored tower (a decoder beside its encoder) has its stream on the right."""

    width: float
    box_width: float
    mirrored: bool

    def x(self, value: float) -> float:
        """Pixel of an unmirrored x."""
        return self.width - value if self.mirrored else value

    def rect(self, x: float, y: float, width: float, height: float, css: str, rx: float = 0.0) -> Markup:
        """A rectangle given by its unmirrored left edge."""
        return svg.rect(self.x(x) - (width if self.mirrored else 0), y, width, height, css, rx=rx)

    def text(self, x: float, y: float, words: object, css: str, anchor: str = "start") -> Markup:
        """Text whose start and end swap in the mirror."""
        swap = {"start": "end", "end": "start"} if self.mirrored else {}
        return svg.text(self.x(x), y, words, css, anchor=swap.get(anchor, anchor))


def norm_slots(branch: Branch) -> dict[str, list[Norm]]:
    """The branch's norms by slot: entry, output, stream.

    A norm's slot is told by the tensors it joins; where a view lies between, by the branch's placement.
    """
    slots: dict[str, list[Norm]] = {"entry": [], "output": [], "stream": []}
    by_placement = {"pre": "entry", "post": "stream", "res-post": "output"}
    for i, norm in enumerate(branch.norms):
        if norm.input == branch.sum:
            slot = "stream"
        elif norm.output == branch.output:
            slot = "output"
        elif norm.input == branch.entry:
            slot = "entry"
        elif branch.placement == "peri":
            slot = "entry" if 2 * i < len(branch.norms) else "output"
        else:
            slot = by_placement.get(branch.placement, "entry")
        slots[slot].append(norm)
    return slots


def stream_width(value: float | None, reference: float | None) -> float:
    """Thickness of the stream in pixels: 8 for the gradient at the top, 2 more or less a decade."""
    if value is None or not reference or not math.isfinite(value) or not math.isfinite(reference):
        return 2.0
    return 1.5 if value <= 0 else min(16.0, max(1.5, 8 + 2 * math.log10(value / reference)))


def draw_towers(layout: Layout, ledger: Ledger, marks: dict[str, str]) -> tuple[Markup, float]:
    """All towers side by side, and the picture's width; `marks`: block site → worst finding's severity."""
    several = len(layout.stacks) > 1
    box = 62.0 if several else 84.0
    width, gap = BOX_X + box + 10, 26.0
    source = cross_source(layout)
    pieces, taps = [], []
    for i, place in enumerate(layout.stacks):
        crossed = source is not None and _is_crossed(place)
        pen = Pen(width, box, mirrored=crossed)
        left = i * (width + gap)
        pieces.append(
            svg.group(
                _stack(place, pen, ledger, layout, marks, several), transform=f"translate({svg.number(left)})"
            )
        )
        if crossed and source is not None:
            taps.append(_cross(source, place, left, width, gap, box))
    total = len(layout.stacks) * (width + gap) - gap
    label = "; ".join(f"{place.stack.name}: {len(place.blocks)} blocks" for place in layout.stacks)
    return svg.picture(total, layout.height, *taps, *pieces, label=f"Tower of {label}", css="tower"), total


def cross_source(layout: Layout) -> StackPlace | None:
    """The stack that cross-attention reads: the first one without any, where another stack has some."""
    crossed = [place for place in layout.stacks if _is_crossed(place)]
    plain = [place for place in layout.stacks if not _is_crossed(place)]
    return plain[0] if crossed and plain else None


def draw_key(block: Block) -> Markup:
    """One block drawn large with its parts named: the key to the tower."""
    high = 58.0
    places = tuple(
        BranchPlace(branch, 14 + (len(block.branches) - 1 - i) * high, 14 + (len(block.branches) - i) * high)
        for i, branch in enumerate(block.branches)
    )
    height = 26 + high * len(block.branches)
    place = BlockPlace(block, 0, 4.0, height - 4, places)
    pen = Pen(330.0, 104.0, mirrored=False)
    parts = [
        svg.line(STREAM_X, height, STREAM_X, 0, "stream-plain"),
        *_branches(place, pen, Ledger(()), high),
    ]
    for spot in places:
        parts.append(svg.text(BOX_X + 114, spot.y - 2, describe_norms(spot.branch), "label"))
        parts.append(
            svg.text(BOX_X + 114, spot.y + 12, svg.clip(describe_join(spot.branch), 34), "label soft")
        )
    return svg.picture(330, height, *parts, label="One block, its parts named", css="key")


def describe_norms(branch: Branch) -> str:
    """A branch's placement in words: "Pre-LN (layernorm)"."""
    words = {
        "pre": "norm before the branch",
        "post": "norm on the stream, after the add",
        "res-post": "norm at the branch's end",
        "peri": "norms before and after the branch",
        "none": "no norm",
    }
    return words.get(branch.placement, branch.placement)


def describe_join(branch: Branch) -> str:
    """Norm kind, join, scales and scheme in a few words."""
    parts = [branch.norm] if branch.norm != "none" else []
    if branch.join != "add":
        parts.append(f"{branch.join} join")
    for name, scale in (("stream", branch.stream_scale), ("branch", branch.branch_scale)):
        if scale not in (None, 1.0):
            parts.append(f"{name} × {scale if isinstance(scale, str) else figure(scale)}")
    if branch.scheme:
        parts.append(branch.scheme)
    return " · ".join(parts) or "plain add"


def _stack(
    place: StackPlace, pen: Pen, ledger: Ledger, layout: Layout, marks: dict[str, str], several: bool
) -> Markup:
    top = ledger.passing(place.blocks[-1].block.site)
    parts = [_stub(place, pen, ledger, top)]
    below = ledger.passing(f"{place.stack.name}.input")
    for block in place.blocks:
        here = ledger.passing(block.block.site)
        parts.append(_block(place, block, pen, ledger, layout, below, here, top, marks))
        below = here
    parts.append(_ends(place, pen, ledger, several))
    return svg.group(*parts)


def _block(
    stack: StackPlace,
    place: BlockPlace,
    pen: Pen,
    ledger: Ledger,
    layout: Layout,
    below: float | None,
    here: float | None,
    top: float | None,
    marks: dict[str, str],
) -> Markup:
    gap = 3.0 if layout.block_height >= 50 else 0.75 if layout.block_height >= 12 else 0.0
    parts = [svg.tag("title", _block_words(stack, place, ledger, here, top))]
    css = "panel" + (" odd" if place.number % 2 else "")
    high = place.bottom - place.top
    parts.append(
        pen.rect(30, place.top + gap, pen.width - 32, high - 2 * gap, css, rx=6.0 if high >= 50 else 0.0)
    )
    parts.append(_stream(place, pen, below, here, top))
    if layout.block_height >= 8:
        parts += _branches(place, pen, ledger, layout.branch_height)
    else:
        parts.append(pen.rect(BOX_X, place.top, pen.box_width, max(1.0, high - 0.6), "box attn"))
    every = next((n for n in (1, 2, 5, 10, 20, 50) if n * high >= 20), 100)
    if place.number % every == 0:
        parts.append(pen.text(26, (place.top + place.bottom) / 2 + 3.5, place.number, "num", "end"))
    if ledger.trial is not None:
        last = ledger.trained(stack.blocks[-1].block.site)
        css = f"after {gradient_class(ledger.trained(place.block.site), last)}"
        parts.append(pen.rect(30, place.top + gap, 4, high - 2 * gap, css))
    if place.block.site in marks:
        parts.append(pen.rect(2, place.top + gap, 3, high - 2 * gap, f"flag {marks[place.block.site]}"))
    return svg.group(*parts, class_="row", data_r=f"{stack.number}:{place.number}")


def _stream(
    place: BlockPlace, pen: Pen, below: float | None, here: float | None, top: float | None
) -> Markup:
    low, high, x = stream_width(below, top) / 2, stream_width(here, top) / 2, pen.x(STREAM_X)
    css = gradient_class(here, top)
    if css == "gx":
        return svg.line(x, place.bottom, x, place.top, "stream-gap")
    corners = [(x - low, place.bottom), (x - high, place.top), (x + high, place.top), (x + low, place.bottom)]
    return svg.tag(
        "polygon",
        points=" ".join(f"{svg.number(a)},{svg.number(b)}" for a, b in corners),
        class_=f"stream {css}",
    )


def _branches(place: BlockPlace, pen: Pen, ledger: Ledger, high: float) -> list[Markup]:
    parts: list[Markup] = []
    run: list[BranchPlace] = []
    for i, spot in enumerate(place.branches):
        run.append(spot)
        following = place.branches[i + 1] if i + 1 < len(place.branches) else None
        if following is not None and following.branch.entry == spot.branch.entry:
            continue  # parallel branches read the same stream and are drawn as one bundle
        draw = _one if len(run) == 1 else _parallel
        parts.append(draw(run, pen, ledger, high))
        run = []
    return parts


def _one(spots: list[BranchPlace], pen: Pen, ledger: Ledger, high: float) -> Markup:
    spot = spots[0]
    leave, join = spot.bottom - 0.24 * high, spot.top + 0.24 * high
    x, box = pen.x(STREAM_X + (0 if high >= FINE else 5)), pen.x(BOX_X)
    slots = norm_slots(spot.branch)
    dead = _is_dead(spot.branch, ledger)
    wire = "wire" + (" dead" if dead else "") + ("" if high >= FINE else " small")
    parts = [svg.line(x, leave, box, leave, wire), svg.line(box, join, x, join, wire)]
    parts.append(_box(spot, pen, high, dead))
    for slot, y in (("entry", leave), ("output", join)):
        for i, norm in enumerate(slots[slot]):
            parts.append(_bar(pen, NORM_X + 5 * i, y, high, ledger.erased(spot.branch, norm)))
    parts.append(_add(spot.branch, pen, join, high))
    parts += _stream_norms(spot, pen, ledger, high, slots["stream"])
    return svg.group(*parts)


def _parallel(spots: list[BranchPlace], pen: Pen, ledger: Ledger, high: float) -> Markup:
    """Branches that read the same stream: fed by a wire on the left, gathered by one on the right."""
    first, last = spots[0], spots[-1]
    feed, join = first.bottom - 0.24 * high, last.top + 0.04 * high
    x, rail, end = pen.x(STREAM_X), pen.x(NORM_X - 4), pen.x(BOX_X + pen.box_width + 5)
    parts = [
        svg.line(x, feed, rail, feed, "wire"),
        svg.line(rail, feed, rail, last.y, "wire"),
        svg.line(end, first.y, end, join, "wire"),
        svg.line(end, join, x, join, "wire"),
    ]
    for spot in spots:
        slots = norm_slots(spot.branch)
        parts.append(svg.line(rail, spot.y, end, spot.y, "wire"))
        parts.append(_box(spot, pen, high * 0.88, _is_dead(spot.branch, ledger)))
        for i, norm in enumerate(slots["entry"]):
            parts.append(_bar(pen, NORM_X + 4 + 5 * i, spot.y, high, ledger.erased(spot.branch, norm)))
        for norm in slots["output"]:
            parts.append(_bar(pen, BOX_X + pen.box_width + 2, spot.y, high, ledger.erased(spot.branch, norm)))
    parts.append(_add(last.branch, pen, join, high))
    parts += _stream_norms(last, pen, ledger, high, norm_slots(last.branch)["stream"])
    return svg.group(*parts)


def _box(spot: BranchPlace, pen: Pen, high: float, dead: bool) -> Markup:
    tall = max(1.2, 0.74 * high)
    kind = spot.branch.kind
    rounded = {"attention": tall / 2, "cross-attention": min(5.0, tall / 3)}.get(kind, 1.0)
    css = f"box {KIND_CSS[kind]}" + (" dead" if dead else "") + ("" if high >= FINE else " small")
    parts = [pen.rect(BOX_X, spot.y - tall / 2, pen.box_width, tall, css, rx=min(rounded, 13.0))]
    if high >= FINE:
        words = KIND_WORDS[kind] if pen.box_width > 80 else KIND_SHORT[kind]
        size = "kind" if high >= 19 else "kind small"
        parts.append(svg.text(pen.x(BOX_X + pen.box_width / 2), spot.y + 3.4, words, size, anchor="middle"))
    return svg.group(*parts)


def _bar(pen: Pen, x: float, y: float, high: float, erased: float | None) -> Markup:
    """A norm on a wire: an upright bar."""
    fine = high >= FINE
    tall, thick = max(2.4, min(15.0, 0.42 * high)), 4.0 if fine else 3.0
    css = f"norm {erased_class(erased)}" + ("" if fine else " small")
    return pen.rect(x - thick / 2, y - tall / 2, thick, tall, css, rx=1.5 if fine else 0.0)


def _stream_norms(
    spot: BranchPlace, pen: Pen, ledger: Ledger, high: float, norms: list[Norm]
) -> list[Markup]:
    """Norms on the stream after the add: a bar lying across the stream."""
    fine = high >= FINE
    wide, thick = (22.0, 4.0) if fine else (15.0, max(1.2, min(2.0, 0.2 * high)))
    y = spot.top + 0.02 * high - thick / 2
    size = "" if fine else " small"
    return [
        pen.rect(
            STREAM_X - wide / 2,
            y + 5 * i,
            wide,
            thick,
            f"norm {erased_class(ledger.erased(spot.branch, norm))}{size}",
            rx=1.5 if fine else 0.0,
        )
        for i, norm in enumerate(norms)
    ]


def _add(branch: Branch, pen: Pen, y: float, high: float) -> Markup:
    if high < FINE:
        return Markup("")
    x, r = pen.x(STREAM_X), min(5.5, 0.17 * high)
    parts = [svg.tag("circle", cx=x, cy=y, r=r, class_="add")]
    if r >= 3:
        cross = [
            svg.line(x - r + 1.5, y, x + r - 1.5, y, "plus"),
            svg.line(x, y - r + 1.5, x, y + r - 1.5, "plus"),
        ]
        turn = f"rotate(45 {svg.number(x)} {svg.number(y)})" if branch.join == "gate" else None
        parts.append(svg.group(*cross, transform=turn))
    if r >= 3 and branch.stream_scale not in (None, 1.0):
        words = "×α" if isinstance(branch.stream_scale, str) else f"×{figure(branch.stream_scale, 2)}"
        parts.append(pen.text(STREAM_X - 8, y + 15, words, "scale", "end"))
    return svg.group(*parts)


def _stub(place: StackPlace, pen: Pen, ledger: Ledger, top: float | None) -> Markup:
    site = f"{place.stack.name}.input"
    here, x = ledger.passing(site), pen.x(STREAM_X)
    css, floor = gradient_class(here, top), place.floor
    width = stream_width(here, top)
    body = (
        svg.line(x, floor + 20, x, floor, "stream-gap")
        if css == "gx"
        else svg.rect(x - width / 2, floor, width, 20, f"stream {css}")
    )
    words = "\n".join(
        filter(None, [f"{place.stack.name}: input of the first block", *_end_words(ledger, site)])
    )
    return svg.group(svg.tag("title", words), body, class_="row", data_r=f"{place.number}:in")


def _ends(place: StackPlace, pen: Pen, ledger: Ledger, several: bool) -> Markup:
    x, y, stack = pen.x(STREAM_X), place.ceiling, place.stack
    site = f"{stack.name}.hidden"
    words = "\n".join(filter(None, [f"{stack.name}: output", *_end_words(ledger, site)]))
    arrow = f"M{svg.number(x - 5)} {svg.number(y - 36)} l5 -9 l5 9 z"
    parts = [
        svg.tag("title", words),
        svg.line(x, y, x, y - 36, "stream-plain"),
        svg.tag("path", d=arrow, class_="tip"),
        pen.text(STREAM_X + 14, y - 36, f"{svg.clip(stack.name, 12)} out" if several else "output", "label"),
        pen.text(
            STREAM_X + 14, place.floor + 18, f"{svg.clip(stack.name, 12)} in" if several else "input", "label"
        ),
    ]
    if ledger.trial is not None:
        parts.append(pen.text(38, y - 4, f"step {ledger.trial.step}", "scale", "end"))
    if stack.final_norm is None:
        parts.append(pen.text(STREAM_X + 14, y - 16, "no final norm", "label soft"))
    else:
        erased = ledger.scalar("gradient/erased", stack.final_norm.path)
        parts.append(pen.rect(STREAM_X - 11, y - 22, 22, 4, f"norm {erased_class(erased)}", rx=1.5))
        parts.append(pen.text(STREAM_X + 14, y - 16, "final norm", "label"))
    return svg.group(*parts, class_="row", data_r=f"{place.number}:out")


def _cross(
    source: StackPlace, place: StackPlace, left: float, width: float, gap: float, box: float
) -> Markup:
    """The encoder's output carried down between the towers to every cross-attention."""
    start = source.number * (width + gap) + STREAM_X
    rail = left - gap / 2
    y = source.ceiling - 30
    spots = [s for b in place.blocks for s in b.branches if s.branch.kind == "cross-attention"]
    into = left + width - BOX_X - box
    ends = [y, *(spot.y for spot in spots)]
    parts = [
        svg.line(start, y, rail, y, "cross-wire"),
        svg.line(rail, min(ends), rail, max(ends), "cross-wire"),
    ]
    parts += [svg.line(rail, spot.y, into, spot.y, "cross-wire") for spot in spots]
    return svg.group(*parts)


def _is_crossed(place: StackPlace) -> bool:
    return any(branch.kind == "cross-attention" for block in place.blocks for branch in block.block.branches)


def _is_dead(branch: Branch, ledger: Ledger) -> bool:
    """Output exactly zero and nothing to learn it from."""
    zero = ledger.scalar("branch/zero-output", branch.site) == 1.0
    return zero and ledger.scalar("branch/trainable", branch.site) == 0.0


def _end_words(ledger: Ledger, site: str) -> list[str]:
    return [ledger.words(q, site) for q in ("stream/rms", "stream/diversity", "gradient/stream")]


def _block_words(
    stack: StackPlace, place: BlockPlace, ledger: Ledger, here: float | None, top: float | None
) -> str:
    site = place.block.site
    lines = [f"{stack.stack.name} · block {place.number} · {site}"]
    if here is not None:
        share = f", {figure(here / top, 3)} × the top" if top else ""
        lines.append(f"gradient/stream  {figure(here, 6)}{share}")
    lines += filter(
        None, (ledger.words(q, site) for q in ("gradient/block", "stream/rms", "stream/diversity"))
    )
    for branch in place.block.branches:
        lines.append(f"{KIND_WORDS[branch.kind]} · {branch.site}")
        lines.append(f"  {branch.placement} · {describe_join(branch)}")
        for norm in branch.norms:
            erased = ledger.erased(branch, norm)
            if erased is not None:
                lines.append(f"  {norm.path} erases {figure(100 * erased, 3)} %")
    return "\n".join(lines)
