"""One block: its branches as loops beside the stream, with norms, adds and scales in their places."""

from dataclasses import dataclass

from markupsafe import Markup

from normscope.anatomy import Block, Branch, Norm
from normscope.report.figures import svg
from normscope.report.figures.layout import BlockPlace, BranchPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import erased_class, figure

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
    """A pen that mirrors x for a tower whose stream is on the right (a decoder beside its encoder)."""

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
        *draw_branches(place, pen, Ledger(()), high),
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


def draw_branches(place: BlockPlace, pen: Pen, ledger: Ledger, high: float) -> list[Markup]:
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
        words = kind if pen.box_width > 80 else KIND_SHORT[kind]
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


def _is_dead(branch: Branch, ledger: Ledger) -> bool:
    """Output exactly zero and nothing to learn it from."""
    zero = ledger.scalar("branch/zero-output", branch.site) == 1.0
    return zero and ledger.scalar("branch/trainable", branch.site) == 0.0
