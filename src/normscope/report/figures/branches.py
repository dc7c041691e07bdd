"""One block: its branches as loops beside the stream, with norms, adds and scales in their places."""

import textwrap
from dataclasses import dataclass

from markupsafe import Markup

from normscope.anatomy import Block, Branch, Norm
from normscope.report.figures import svg
from normscope.report.figures.layout import BlockPlace, BranchPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import erased_class, figure

KIND_SHORT = {"cross-attention": "cross-attn", "feed-forward": "feed-fwd"}
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


def form(block: Block) -> tuple[tuple[str, str, str], ...]:
    """The properties that two blocks must share to be drawn as one: of each branch kind, norms and join."""
    return tuple((branch.kind, branch.placement, describe_join(branch)) for branch in block.branches)


def draw_key(block: Block) -> Markup:
    """One block drawn large with its parts named: the key to the tower."""
    high, count = 58.0, len(block.branches)
    places = tuple(
        BranchPlace(branch, 14 + (count - 1 - i) * high, 14 + (count - i) * high)
        for i, branch in enumerate(block.branches)
    )
    height = 26 + high * count
    brush = Brush(Pen(330.0, 104.0, mirrored=False), Ledger(()), high)
    parts = [svg.line(STREAM_X, height, STREAM_X, 0, "stream-plain")]
    parts += brush.branches(BlockPlace(block, 0, 4.0, height - 4, places))
    for spot in places:
        parts.append(svg.text(BOX_X + 114, spot.y - 8, describe_norms(spot.branch), "label"))
        for number, line in enumerate(textwrap.wrap(describe_join(spot.branch), 32)[:3]):
            parts.append(svg.text(BOX_X + 114, spot.y + 5 + 12 * number, line, "label soft"))
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


@dataclass(frozen=True)
class Brush:
    """Draws the branches of a block, each `high` pixels, with the figures of `ledger`."""

    pen: Pen
    ledger: Ledger
    high: float

    @property
    def fine(self) -> bool:
        """True where there is room for outlines and words."""
        return self.high >= FINE

    def branches(self, place: BlockPlace) -> list[Markup]:
        """All branches; parallel ones, which read the same stream, as one bundle."""
        bundles: list[list[BranchPlace]] = []
        for spot in place.branches:
            if bundles and bundles[-1][-1].branch.entry == spot.branch.entry:
                bundles[-1].append(spot)
            else:
                bundles.append([spot])
        return [self._one(*spots) if len(spots) == 1 else self._parallel(spots) for spots in bundles]

    def _one(self, spot: BranchPlace) -> Markup:
        leave, join = spot.bottom - 0.24 * self.high, spot.top + 0.24 * self.high
        x, box = self.pen.x(STREAM_X + (0 if self.fine else 5)), self.pen.x(BOX_X)
        slots = norm_slots(spot.branch)
        wire = self._css("wire" + (" dead" if self._is_dead(spot.branch) else ""))
        parts = [svg.line(x, leave, box, leave, wire), svg.line(box, join, x, join, wire)]
        parts.append(self._box(spot, self.high))
        for slot, y in (("entry", leave), ("output", join)):
            parts += [self._bar(spot, norm, NORM_X + 5 * i, y) for i, norm in enumerate(slots[slot])]
        parts.append(self._add(spot.branch, join))
        return svg.group(*parts, *self._stream_norms(spot))

    def _parallel(self, spots: list[BranchPlace]) -> Markup:
        """Branches that read the same stream: fed by a wire on the left, gathered by one on the right."""
        first, last = spots[0], spots[-1]
        feed, join = first.bottom - 0.24 * self.high, last.top + 0.04 * self.high
        right = BOX_X + self.pen.box_width
        x, rail, end = self.pen.x(STREAM_X), self.pen.x(NORM_X - 4), self.pen.x(right + 5)
        parts = [
            svg.line(x, feed, rail, feed, "wire"),
            svg.line(rail, feed, rail, last.y, "wire"),
            svg.line(end, first.y, end, join, "wire"),
            svg.line(end, join, x, join, "wire"),
        ]
        for spot in spots:
            slots = norm_slots(spot.branch)
            parts += [svg.line(rail, spot.y, end, spot.y, "wire"), self._box(spot, self.high * 0.88)]
            parts += [
                self._bar(spot, norm, NORM_X + 4 + 5 * i, spot.y) for i, norm in enumerate(slots["entry"])
            ]
            parts += [self._bar(spot, norm, right + 2, spot.y) for norm in slots["output"]]
        parts.append(self._add(last.branch, join))
        return svg.group(*parts, *self._stream_norms(last))

    def _css(self, words: str) -> str:
        return words if self.fine else f"{words} small"

    def _box(self, spot: BranchPlace, high: float) -> Markup:
        tall, kind, width = max(1.2, 0.74 * high), spot.branch.kind, self.pen.box_width
        rounded = {"attention": tall / 2, "cross-attention": min(5.0, tall / 3)}.get(kind, 1.0)
        css = f"box {KIND_CSS[kind]}" + (" dead" if self._is_dead(spot.branch) else "")
        css += "" if high >= FINE else " small"
        parts = [self.pen.rect(BOX_X, spot.y - tall / 2, width, tall, css, rx=min(rounded, 13.0))]
        if high >= FINE:
            words = kind if width > 80 else KIND_SHORT.get(kind, kind)
            size = "kind" if high >= 19 else "kind small"
            parts.append(svg.text(self.pen.x(BOX_X + width / 2), spot.y + 3.4, words, size, anchor="middle"))
        return svg.group(*parts)

    def _bar(self, spot: BranchPlace, norm: Norm, x: float, y: float) -> Markup:
        """A norm on a wire: an upright bar."""
        tall, thick = max(2.4, min(15.0, 0.42 * self.high)), 4.0 if self.fine else 3.0
        return self._norm(spot, norm, x - thick / 2, y - tall / 2, thick, tall)

    def _stream_norms(self, spot: BranchPlace) -> list[Markup]:
        """Norms on the stream after the add: a bar lying across the stream."""
        wide, thick = (22.0, 4.0) if self.fine else (15.0, max(1.2, min(2.0, 0.2 * self.high)))
        x, y = STREAM_X - wide / 2, spot.top + 0.02 * self.high - thick / 2
        norms = norm_slots(spot.branch)["stream"]
        return [self._norm(spot, norm, x, y + 5 * i, wide, thick) for i, norm in enumerate(norms)]

    def _norm(self, spot: BranchPlace, norm: Norm, x: float, y: float, width: float, height: float) -> Markup:
        css = self._css(f"norm {erased_class(self.ledger.erased(spot.branch, norm))}")
        return self.pen.rect(x, y, width, height, css, rx=1.5 if self.fine else 0.0)

    def _add(self, branch: Branch, y: float) -> Markup:
        if not self.fine:
            return Markup("")
        x, r = self.pen.x(STREAM_X), min(5.5, 0.17 * self.high)
        parts = [svg.tag("circle", cx=x, cy=y, r=r, class_="add")]
        if r >= 3:
            arm = r - 1.5
            cross = [svg.line(x - arm, y, x + arm, y, "plus"), svg.line(x, y - arm, x, y + arm, "plus")]
            turn = f"rotate(45 {svg.number(x)} {svg.number(y)})" if branch.join == "gate" else None
            parts.append(svg.group(*cross, transform=turn))
        if r >= 3 and branch.stream_scale not in (None, 1.0):
            words = "×α" if isinstance(branch.stream_scale, str) else f"×{figure(branch.stream_scale, 2)}"
            parts.append(self.pen.text(STREAM_X - 8, y + 15, words, "scale", "end"))
        return svg.group(*parts)

    def _is_dead(self, branch: Branch) -> bool:
        """Output exactly zero and nothing to learn it from."""
        zero = self.ledger.scalar("branch/zero-output", branch.site) == 1.0
        return zero and self.ledger.scalar("branch/trainable", branch.site) == 0.0
