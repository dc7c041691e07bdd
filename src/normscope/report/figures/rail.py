"""The rail between the profiles and the findings: a bracket over the blocks that each finding speaks of."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normscope.report.figures import svg
from normscope.report.figures.layout import BlockPlace, Layout, StackPlace
from normscope.rules import Finding

LANE = 15.0
ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Spot:
    """A finding's number in the page and the blocks it speaks of (none: the whole model)."""

    number: int
    finding: Finding
    places: tuple[tuple[StackPlace, BlockPlace], ...]

    @property
    def top(self) -> float:
        """Upper end of its blocks."""
        return min(block.top for _, block in self.places)

    @property
    def bottom(self) -> float:
        """Lower end of its blocks."""
        return max(block.bottom for _, block in self.places)


def place_findings(findings: Sequence[Finding], layout: Layout) -> list[Spot]:
    """Findings numbered from the worst on, each with its blocks."""
    known = layout.site_places()
    spots = []
    for number, finding in enumerate(sorted(findings, key=lambda f: ORDER[str(f.severity)]), 1):
        found = (known[site] for site in finding.sites if site in known)
        places = {(stack.number, block.number): (stack, block) for stack, block in found}
        spots.append(Spot(number, finding, tuple(places[key] for key in sorted(places))))
    return spots


def marks(spots: Sequence[Spot]) -> dict[str, str]:
    """Block site → severity of the worst finding that speaks of it."""
    found: dict[str, str] = {}
    for spot in spots:  # worst first
        for _, block in spot.places:
            found.setdefault(block.block.site, str(spot.finding.severity))
    return found


def draw_rail(spots: Sequence[Spot], layout: Layout) -> Markup:
    """One lane a finding where brackets overlap; the numbers are those of the cards."""
    lanes: list[list[Spot]] = []
    parts = []
    for spot in (s for s in spots if s.places):
        number = next((i for i, lane in enumerate(lanes) if all(_apart(spot, s) for s in lane)), len(lanes))
        if number == len(lanes):
            lanes.append([])
        lanes[number].append(spot)
        parts.append(_bracket(spot, number))
    width = max(1, len(lanes)) * LANE + 8
    return svg.picture(width, layout.height, *parts, label="Blocks that the findings name", css="rail")


def _bracket(spot: Spot, lane: int) -> Markup:
    x = lane * LANE + 9
    runs: list[tuple[float, float]] = []
    for _, block in sorted(spot.places, key=lambda p: p[1].top):
        if runs and block.top <= runs[-1][1] + 0.5:
            runs[-1] = (runs[-1][0], max(runs[-1][1], block.bottom))
        else:
            runs.append((block.top, block.bottom))
    parts = [svg.tag("title", f"{spot.number} · {spot.finding.code} {spot.finding.name}")]
    parts += [
        svg.rect(x - 1.5, top + 1, 3, max(1.0, bottom - top - 2), "span", rx=1.5) for top, bottom in runs
    ]
    parts.append(svg.tag("circle", cx=x, cy=spot.top + 8, r=7))
    parts.append(svg.text(x, spot.top + 11.5, spot.number, "no", anchor="middle"))
    link = svg.tag("a", *parts, href=f"#finding-{spot.number}")
    return svg.group(link, class_=f"bracket {spot.finding.severity}", data_f=spot.number)


def _apart(one: Spot, other: Spot) -> bool:
    return one.bottom + 4 < other.top or other.bottom + 4 < one.top
