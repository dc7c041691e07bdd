"""The tower: each stack from its input (bottom) to its output (top), branches and norms in their places."""

import math

from markupsafe import Markup

from normscope.report.figures import svg
from normscope.report.figures.branches import BOX_X, STREAM_X, Pen, describe_join, draw_branches
from normscope.report.figures.layout import BlockPlace, Layout, StackPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import erased_class, figure, gradient_class


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
        parts += draw_branches(place, pen, ledger, layout.branch_height)
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
        lines.append(f"{branch.kind} · {branch.site}")
        lines.append(f"  {branch.placement} · {describe_join(branch)}")
        for norm in branch.norms:
            erased = ledger.erased(branch, norm)
            if erased is not None:
                lines.append(f"  {norm.path} erases {figure(100 * erased, 3)} %")
    return "\n".join(lines)
