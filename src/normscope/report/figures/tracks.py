"""Profiles by depth: narrow upright plots beside the tower, all on its depth axis."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from normscope.report.figures import svg
from normscope.report.figures.branches import KIND_CSS
from normscope.report.figures.charts import finite_stretches
from normscope.report.figures.layout import Layout, StackPlace
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.scales import Scale, figure, fit

PAD = 9.0


@dataclass(frozen=True)
class Profile:
    """Content of one plot.

    Attributes:
        at: whether its figures are those of blocks ("block") or of branches ("branch").
        lines: quantity → the line's name and CSS class; without a class, a line for each kind of branch.
        span: ends of a linear axis; without it the axis is logarithmic and fits the figures.
    """

    title: str
    about: str
    at: str
    lines: Mapping[str, tuple[str, str]]
    reference: float | None = None
    span: tuple[float, float] | None = None


INK, BY_KIND = ("", "c-ink"), ("", "")
PROFILES = (
    Profile("Stream RMS", "RMS of the residual stream", "block", {"stream/rms": INK}),
    Profile(
        "Token diversity",
        "share of the stream outside its mean over tokens; at 0 all tokens are the same",
        "block",
        {"stream/diversity": INK},
    ),
    Profile(
        "Update ratio",
        "RMS of what a branch adds, relative to the stream's",
        "branch",
        {"branch/update-ratio": BY_KIND},
    ),
    Profile(
        "Gradient",
        "L2 norm on the stream, of each block's weights, and of the weights after the trial",
        "block",
        {"gradient/stream": ("stream", "c-ink"), "gradient/block": ("weights", "c-a")},
    ),
    Profile(
        "q k v o gradients",
        "RMS of the gradient of each projection",
        "branch",
        {
            f"gradient/{role}": (role, css)
            for role, css in zip("qkvo", ("c-a", "c-b", "c-c", "c-d"), strict=True)
        },
    ),
    Profile(
        "Attention entropy",
        "1: uniform over tokens, 0: all on one token",
        "branch",
        {"attention/entropy": BY_KIND},
        span=(0.0, 1.0),
    ),
    Profile(
        "Block σ",
        "largest and smallest non-zero singular value of a block's Jacobian",
        "block",
        {"jacobian/sigma-max": ("max", "c-ink"), "jacobian/sigma-min-nonzero": ("min", "c-a")},
    ),
    Profile(
        "Branch ‖A‖",
        "largest singular value of each branch's Jacobian; below 1 its block is invertible",
        "branch",
        {"jacobian/branch-norm": BY_KIND},
        reference=1.0,
    ),
)


@dataclass
class Line:
    """One line of a plot: points from the input up; None is a gap."""

    name: str
    css: str
    dashed: bool
    points: list[tuple[float, float | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Track:
    """A drawn profile, with the words above it."""

    title: str
    about: str
    legend: tuple[tuple[str, str], ...]
    said: str
    picture: Markup


def draw_tracks(layout: Layout, ledger: Ledger, width: float) -> list[Track]:
    """Every profile of which a probe made at least one row."""
    tracks = []
    for profile in PROFILES:
        lines = [line for stack in layout.stacks for line in _lines(profile, stack, layout, ledger)]
        if profile.title == "Gradient" and ledger.trial is not None:
            lines += [_after_trial(stack, layout, ledger) for stack in layout.stacks]
        known = [line for line in lines if any(value is not None for _, value in line.points)]
        lines = known or lines  # a line without a single figure goes unless it is all there is
        if lines:
            tracks.append(_track(profile, lines, layout, ledger, width))
    return tracks


def _lines(profile: Profile, stack: StackPlace, layout: Layout, ledger: Ledger) -> list[Line]:
    made: dict[tuple[str, str, str], Line] = {}
    for quantity, (name, css) in profile.lines.items():
        for key, y, site in _places(profile.at, stack, name, css):
            row = ledger.find(quantity, site)
            if row is not None:
                line = made.setdefault(key, Line(key[0], key[1], _is_dashed(stack, layout)))
                line.points.append((y, float(row.value) if isinstance(row.value, float | int) else None))
    return list(made.values())


def _after_trial(stack: StackPlace, layout: Layout, ledger: Ledger) -> Line:
    assert ledger.trial is not None
    points = [(place.top, ledger.trained(place.block.site)) for place in stack.blocks]
    return Line(f"step {ledger.trial.step}", "c-c", _is_dashed(stack, layout), points)


def _is_dashed(stack: StackPlace, layout: Layout) -> bool:
    return len(layout.stacks) > 1 and stack.number % 2 == 0


def _places(
    at: str, stack: StackPlace, name: str, css: str
) -> Iterable[tuple[tuple[str, str, str], float, str]]:
    """((the line's name, its class, the branch's kind), y, site) from the input up."""
    if at == "branch":
        for place in stack.blocks:
            for spot in place.branches:
                short = KIND_CSS[spot.branch.kind]
                line = (name, css) if css else (short, f"k-{short}")
                yield (*line, spot.branch.kind), spot.y, spot.branch.site
        return
    yield (name, css, ""), stack.input_y, f"{stack.stack.name}.input"
    for place in stack.blocks:
        yield (name, css, ""), place.top, place.block.site
    yield (name, css, ""), stack.hidden_y, f"{stack.stack.name}.hidden"


def _track(profile: Profile, lines: list[Line], layout: Layout, ledger: Ledger, width: float) -> Track:
    values = [value for line in lines for _, value in line.points]
    if profile.span:
        scale = Scale(*profile.span, PAD, width - PAD)
    else:
        scale = fit([*values, profile.reference], PAD, width - PAD, log=True)
    is_empty = all(value is None for value in values)
    parts = [_bands(layout, width)]
    if not is_empty:  # a scale of no figures would only cross the words
        parts.append(_grid(scale, profile, layout, width))
    parts += [_draw(line, scale, dots=layout.depth <= 32) for line in lines]
    parts.append(svg.rect(0, 0, width, 0, "cursor"))
    if layout.depth <= 128:
        parts += _hover(profile, layout, ledger, width)
    legend = tuple(dict.fromkeys((line.name, line.css) for line in lines if line.name))
    if is_empty:
        parts.append(svg.text(width / 2, layout.height / 2, "not measured", "label soft", anchor="middle"))
    picture = svg.picture(width, layout.height, *parts, label=f"{profile.title} by depth", css="track")
    return Track(profile.title, profile.about, legend, _said(values), picture)


def _said(values: list[float | None]) -> str:
    """The missing values of a profile, in a few words: "8/16 missing, 3 not finite"."""
    gaps = sum(value is None for value in values)
    odd = sum(value is not None and not math.isfinite(value) for value in values)
    parts = [f"{gaps}/{len(values)} missing"] if 0 < gaps < len(values) else []
    parts += [f"{odd} not finite"] if odd else []
    return ", ".join(parts)


def _bands(layout: Layout, width: float) -> Markup:
    """The tower's every other block, carried on as a faint band."""
    odd = [block for block in _deepest(layout).blocks if block.number % 2] if layout.block_height >= 6 else []
    return svg.group(*(svg.rect(0, block.top, width, block.bottom - block.top, "band") for block in odd))


def _grid(scale: Scale, profile: Profile, layout: Layout, width: float) -> Markup:
    parts = []
    for tick, words in scale.labelled(3 if width >= 76 else 2):
        x = scale(tick)
        parts.append(svg.line(x, 16, x, layout.height - 14, "grid"))
        anchor = "start" if x < 24 else "end" if x > width - 24 else "middle"
        at = max(1.0, x - 6) if anchor == "start" else min(width - 1, x + 6) if anchor == "end" else x
        for y in (11.0, layout.height - 3):
            parts.append(svg.text(at, y, words, "tick", anchor=anchor))
    if profile.reference is not None:
        x = scale(profile.reference)
        parts.append(svg.line(x, 16, x, layout.height - 14, "ref"))
    return svg.group(*parts)


def _draw(line: Line, scale: Scale, *, dots: bool) -> Markup:
    css = f"line {line.css}" + (" dashed" if line.dashed else "")
    stretches = finite_stretches(line.points)
    parts = [svg.path([(scale(x), y) for y, x in each], css) for each in stretches if len(each) > 1]
    for each in stretches:
        if dots or len(each) == 1:
            drawn = [(scale(x), y) for y, x in each if x > 0 or not scale.log]
            parts += svg.dots(drawn, 2, f"dot {line.css}")
    for y, value in line.points:
        if value is not None and not math.isfinite(value):
            x = scale.start if value == -math.inf else scale.end
            parts.append(svg.text(x, y + 3.5, "×", "bad", anchor="middle"))
        elif value is not None and value <= 0 and scale.log:
            parts.append(svg.text(scale.start, y + 3.5, "0" if value == 0 else "−", "zero", anchor="middle"))
    return svg.group(*parts)


def _hover(profile: Profile, layout: Layout, ledger: Ledger, width: float) -> list[Markup]:
    """Invisible areas with the exact figures: one for each block's number, one for each end of the stacks."""
    parts = []
    for number, place in enumerate(_deepest(layout).blocks):
        lines = [
            line
            for stack in layout.stacks
            if number < len(stack.blocks)
            for line in _hover_lines(profile, stack, number, ledger)
        ]
        if lines:
            parts.append(svg.hit(0, place.top, width, place.bottom - place.top, *lines))
    ends = {"input": layout.stacks[0].input_y - 13, "hidden": min(s.hidden_y for s in layout.stacks) - 12}
    for end, y in ends.items():
        lines = [
            words
            for stack in layout.stacks
            for quantity, (name, _) in profile.lines.items()
            if (words := ledger.words(quantity, f"{stack.stack.name}.{end}", name or profile.title))
        ]
        if lines:
            parts.append(svg.hit(0, y, width, 26, "output" if end == "hidden" else end, *lines))
    return parts


def _hover_lines(profile: Profile, stack: StackPlace, number: int, ledger: Ledger) -> list[str]:
    place, lines = stack.blocks[number], []
    for quantity, (name, css) in profile.lines.items():
        if profile.at == "block":
            lines.append(ledger.words(quantity, place.block.site, name or profile.title))
            if quantity == "gradient/block" and ledger.trial is not None:
                after = figure(ledger.trained(place.block.site), 6)
                lines.append(f"weights, step {ledger.trial.step}  {after}")
            continue
        for spot in place.branches:
            kind = spot.branch.kind
            words = ledger.words(quantity, spot.branch.site, name if css else KIND_CSS[kind])
            lines.append(f"{words}  ({kind})" if words and css and len(place.branches) > 2 else words)
    lines = [line for line in lines if line]
    return [f"{stack.stack.name} · block {number}: {profile.title}", *lines] if lines else []


def _deepest(layout: Layout) -> StackPlace:
    return max(layout.stacks, key=lambda stack: len(stack.blocks))
