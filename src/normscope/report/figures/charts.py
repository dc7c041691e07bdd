"""Charts with an upright value axis: the forecast by step, and spectra of singular values."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normscope.report.figures import svg
from normscope.report.figures.scales import Scale, figure, fit

WIDTH, HEIGHT = 440.0, 236.0
LEFT, RIGHT, UPPER, LOWER = 46.0, 76.0, 14.0, 34.0
LINE = 13.0
"""Height of a line of labels."""
MOST_LETTERS = 11
"""Letters of a name that fit at a line's end."""
MOST_NATS = 50.0
"""Loss from which on the axis is logarithmic: a run that diverges would flatten all else."""
LINES = ("c-ink", "c-a", "c-c", "c-b", "c-d")
"""Classes of the charts' lines, in order."""


@dataclass(frozen=True)
class Curve:
    """A named line; `ys` may hold None (not measured), NaN and infinities, which become gaps and marks.

    With `label` false its name stands under the pointer alone, not at its end.
    """

    name: str
    css: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    dashed: bool = False
    label: bool = True

    @property
    def stretches(self) -> list[list[tuple[float, float]]]:
        """The points that lines join."""
        return finite_stretches(zip(self.xs, self.ys, strict=True))


@dataclass(frozen=True)
class Picture:
    """A chart with its title and what to read from it.

    Attributes:
        legend: (number, name, CSS class) of each line, where a name is too long for the line's end.
    """

    title: str
    about: str
    drawing: Markup
    legend: tuple[tuple[str, str, str], ...] = ()


def legend(curves: Sequence[Curve]) -> tuple[tuple[str, str, str], ...]:
    """Number, name and class of each named line, where a name is too long to stand at the line's end."""
    if all(len(curve.name) <= MOST_LETTERS for curve in curves):
        return ()
    return tuple(
        (str(number), curve.name, curve.css) for number, curve in enumerate(curves, 1) if curve.label
    )


def is_log(losses: Iterable[float | None]) -> bool:
    """True if a finite loss is so large that the axis of losses has to be logarithmic."""
    return any(loss is not None and MOST_NATS < loss < math.inf for loss in losses)


def about_marks(curves: Sequence[Curve]) -> str:
    """A sentence on the marks of a chart, for the end of its description; "" if it has none."""
    odd = any(y is not None and not math.isfinite(y) for curve in curves for y in curve.ys)
    return " × marks a value that is not finite." if odd else ""


def chart(
    curves: Sequence[Curve],
    *,
    label: str,
    x_label: str,
    log: bool,
    level: tuple[float, str] | None = None,
    dots: bool = True,
) -> Markup:
    """A line chart with direct labels at the lines' ends and one optional named level."""
    xs = [x for curve in curves for x in curve.xs]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    across = Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
    parts = plot(curves, across, UPPER, x_label, log=log, level=level, dots=dots)
    return svg.picture(WIDTH, HEIGHT, *parts, *_slices(curves, across, x_label), label=label, css="chart")


def plot(
    curves: Sequence[Curve],
    across: Scale,
    upper: float,
    x_label: str,
    *,
    log: bool,
    level: tuple[float, str] | None = None,
    dots: bool = True,
) -> list[Markup]:
    """Axes, level and curves; the value axis (logarithmic where `log`) ends at the height `upper`."""
    values = [y for curve in curves for y in curve.ys] + ([level[0]] if level else [])
    up = fit(values, HEIGHT - LOWER, upper, log=log)
    parts = [_axes(across, up, x_label)]
    numbers = {name: number for number, name, _ in legend(curves)}
    names: list[tuple[float, float, str, str]] = []
    if level is not None:
        y = up(level[0])
        parts.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "ref"))
        names.append((WIDTH - RIGHT + 6, y, level[1], "label soft"))
    for curve in curves:
        drawn, end = _curve(curve, across, up, dots=dots)
        parts += drawn
        if curve.label and end is not None:
            names.append((end[0] + 7, end[1], numbers.get(curve.name, curve.name), f"end {curve.css}"))
    names.sort(key=lambda name: name[1])
    heights = _apart([y for _, y, *_ in names])
    parts += [svg.text(x, y + 3.5, name, css) for (x, _, name, css), y in zip(names, heights, strict=True)]
    return parts


def heat(
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], xs: Sequence[float], *, label: str, x_label: str
) -> Markup:
    """A field of coloured cells, first row at the bottom: (name, (CSS class, words) by x)."""
    across = (WIDTH - LEFT - RIGHT) / len(xs)
    high = (HEIGHT - UPPER - LOWER) / len(rows)
    every = max(1, math.ceil(14 / high))
    parts = []
    for i, (name, cells) in enumerate(rows):
        y = HEIGHT - LOWER - (i + 1) * high
        if i % every == 0:
            parts.append(svg.text(LEFT - 6, y + high / 2 + 3.5, svg.clip(name, 7), "tick", anchor="end"))
        start = 0
        for k in range(1, len(cells) + 1):
            if k == len(cells) or cells[k][0] != cells[start][0]:
                x, wide = LEFT + start * across, (k - start) * across
                parts.append(svg.rect(x, y, wide, high, f"cell {cells[start][0]}"))
                start = k
    step = max(1, math.ceil(len(xs) / 6))
    for k in range(0, len(xs), step):
        parts.append(
            svg.text(LEFT + (k + 0.5) * across, HEIGHT - LOWER + 15, f"{xs[k]:g}", "tick", anchor="middle")
        )
    for k, x in enumerate(xs):
        lines = [f"{name}  {cells[k][1]}" for name, cells in reversed(rows[:40])]
        area = (LEFT + k * across, UPPER, across, HEIGHT - UPPER - LOWER)
        parts.append(svg.hit(*area, f"{x_label} {x:g}", *lines))
    parts.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "tick", anchor="middle"))
    return svg.picture(WIDTH, HEIGHT, *parts, label=label, css="chart")


def _axes(across: Scale, up: Scale, x_label: str) -> Markup:
    parts = []
    for tick, words in up.labelled(5):
        y = up(tick)
        parts.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        parts.append(svg.text(LEFT - 6, y + 3.5, words, "tick", anchor="end"))
    for tick, words in across.labelled(6):
        if across.log or float(tick).is_integer():
            parts.append(svg.text(across(tick), HEIGHT - LOWER + 15, words, "tick", anchor="middle"))
    middle = (across.start + across.end) / 2
    parts.append(svg.line(LEFT, HEIGHT - LOWER, WIDTH - RIGHT, HEIGHT - LOWER, "axis"))
    parts.append(svg.text(middle, HEIGHT - 4, x_label, "tick", anchor="middle"))
    return svg.group(*parts)


def _curve(
    curve: Curve, across: Scale, up: Scale, *, dots: bool
) -> tuple[list[Markup], tuple[float, float] | None]:
    """A curve, and the pixel where it ends; None where nothing of it can be drawn."""
    parts = [
        svg.text(across(x), up.start + 4 if y == -math.inf else up.end - 2, "×", "bad", anchor="middle")
        for x, y in zip(curve.xs, curve.ys, strict=True)
        if y is not None and not math.isfinite(y)
    ]
    stretches = [[(across(x), up(y)) for x, y in each] for each in curve.stretches]
    css = f"line {curve.css}" + (" dashed" if curve.dashed else "")
    for each in stretches:
        if len(each) > 1:
            parts.append(svg.path(each, css))
        if len(each) == 1 or (dots and len(each) <= 64):
            parts += svg.dots(each, 2.4, f"dot {curve.css}")
    return parts, stretches[-1][-1] if stretches else None


def finite_stretches(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The points with finite values, in stretches that None, NaN and infinities part."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None or not math.isfinite(value):
            stretches.append([])
        else:
            stretches[-1].append((at, value))
    return [each for each in stretches if each]


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels in the order of `heights`, ascending, a line apart and above the ticks."""
    placed: list[float] = []
    for y in heights:
        placed.append(max(y, placed[-1] + LINE if placed else y))
    floor = HEIGHT - LOWER
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], floor)
        floor = placed[i] - LINE
    return placed


def _slices(curves: Sequence[Curve], across: Scale, x_label: str) -> list[Markup]:
    """Invisible upright slices that carry the exact figures; at most about 96 of them."""
    points: dict[float, list[str]] = {}
    for curve in curves:
        for x, y in zip(curve.xs, curve.ys, strict=True):
            points.setdefault(x, []).append(f"{curve.name}  {figure(y, 6)}")
    keys = sorted(points)
    every = max(1, math.ceil(len(keys) / 96))
    shown = keys[::every]
    parts = []
    for i, x in enumerate(shown):
        left = across(x) if i == 0 else (across(x) + across(shown[i - 1])) / 2
        right = across(x) if i + 1 == len(shown) else (across(x) + across(shown[i + 1])) / 2
        left, right = min(left, across(x) - 2), max(right, across(x) + 2)
        area = (left, UPPER, right - left, HEIGHT - UPPER - LOWER)
        parts.append(svg.hit(*area, f"{x_label} {x:g}", *points[x]))
    return parts
