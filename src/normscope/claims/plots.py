"""Plots of claims, and how they are drawn as SVG: intervals as bands, levels as dashed lines."""

import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from normscope.maps.draw import CARD, FAINT, INK, SOFT, THEMED, style
from normscope.report.page import themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from normscope.claims.evidence import Case

SIZE = (5.0, 3.1)  # inches
COLOURS = ("#1f5fa8", "#bf5b17", "#7a3f8f", "#3a7d6b", "#8a6d1c", "#626a75", "#a3285e", "#4f94cd")
"""Colours that people who see no red or green can distinguish; marks and dashes differ too."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.2, 1.5)))


@dataclass(frozen=True)
class Line:
    """Points of a plot under one name.

    Attributes:
        name: for the key.
        x, y: the points; what is not finite is left out when drawn.
        low, high: the interval at each point, empty for none.
        marks: whether to draw points alone.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: bool = False

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high"):  # lists, as JSON gives them back: a range cannot be written
            object.__setattr__(self, name, list(getattr(self, name)))

    @classmethod
    def over_seeds(cls, name: str, points: Mapping[float, Sequence[float]], *, marks: bool = False) -> "Line":
        """Median, smallest and largest of the values at each x."""
        xs = sorted(points)
        middle, low, high = ([of(points[x]) for x in xs] for of in (statistics.median, min, max))
        return cls(name, xs, middle, low, high, marks)


def lines_at(points: Iterable[tuple[str, float, float]], *, marks: bool = False) -> list[Line]:
    """A line of each name, over the values at each x of points (name, x, value)."""
    found: dict[str, dict[float, list[float]]] = {}
    for name, x, value in points:
        found.setdefault(name, {}).setdefault(x, []).append(value)
    return [Line.over_seeds(name, each, marks=marks) for name, each in found.items()]


def lines_by(cases: "Iterable[Case]", x: str, name: str = "") -> list[Line]:
    """A line for each `at[name]` of the cases, or a single one: their values against `at[x]`."""
    keys = ((str(case.at[name]) if name else "measured", case) for case in cases)
    return lines_at(((key, float(case.at[x]), case.value) for key, case in keys))


def lines_along(
    xs: Sequence[float], rows: Mapping[str, Mapping[int, Sequence[float]]], *, marks: bool = False
) -> list[Line]:
    """A line of each name over the rows of its seeds; the values of a row are those at `xs`, in order."""
    named = ((name, row) for name, by_seed in rows.items() for row in by_seed.values())
    points = ((name, x, value) for name, row in named for x, value in zip(xs, row, strict=False))
    return lines_at(points, marks=marks)  # a run that diverged ends early


@dataclass(frozen=True)
class Plot:
    """A picture of what was measured.

    Attributes:
        title: what it shows.
        x, y: the axes, with units.
        lines: the data.
        log: which axes are logarithmic: "", "x", "y" or "xy".
        levels: horizontal lines to compare with, by name.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: Literal["", "x", "y", "xy"] = ""
    levels: Mapping[str, float] = field(default_factory=dict)


def draw(plot: Plot, name: str) -> str:
    """An `<svg>` element; every id in it begins with `name`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style() | {"font.size": 8.5, "figure.facecolor": CARD, "savefig.facecolor": CARD}):
        figure = Figure(figsize=SIZE)
        axes = figure.add_subplot()
        for number, line in enumerate(plot.lines):
            _draw_line(axes, line, number, plot.log)
        _draw_levels(axes, plot)
        _dress(axes, plot)
        text = io.StringIO()
        figure.savefig(
            text, format="svg", bbox_inches="tight", pad_inches=0.06, metadata={"Date": None, "Creator": None}
        )
    names = {colour: f"p{number}" for number, colour in enumerate(COLOURS)} | THEMED
    return themed(_small(text.getvalue(), name, f"{plot.title}: {plot.y} against {plot.x}"), names)


def drawable(line: Line, log: str) -> list[tuple[float, float, float, float]]:
    """The points (x, y, low, high) that can be drawn: finite, and above zero on a logarithmic axis."""
    lows = line.low or line.y
    highs = line.high or line.y
    points = []
    for x, y, low, high in zip(line.x, line.y, lows, highs, strict=True):
        seen = _is_seen(x, "x" in log) and _is_seen(y, "y" in log)
        low, high = (value if _is_seen(value, "y" in log) else y for value in (low, high))
        if seen:
            points.append((float(x), float(y), float(low), float(high)))
    return points


def _is_seen(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _draw_line(axes: "Axes", line: Line, number: int, log: str) -> None:
    points = drawable(line, log)
    colour = COLOURS[number % len(COLOURS)]
    if not points:
        axes.plot([], [], color=colour, label=f"{line.name} (none can be drawn)")
        return
    xs, ys, lows, highs = zip(*points, strict=True)
    how: dict[str, Any] = {"color": colour, "label": line.name, "markersize": 3.4 if len(xs) < 40 else 1.8}
    if line.marks:
        axes.plot(xs, ys, MARKS[number % len(MARKS)], alpha=0.8, **how)
        if line.low:
            axes.vlines(xs, lows, highs, color=colour, linewidth=0.9, alpha=0.6)
        return
    if line.low:
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.16, linewidth=0)
    mark = MARKS[number % len(MARKS)] if len(xs) < 40 else ""
    axes.plot(xs, ys, marker=mark, linestyle=DASHES[number % len(DASHES)], linewidth=1.5, **how)


def _draw_levels(axes: "Axes", plot: Plot) -> None:
    for name, level in plot.levels.items():
        if _is_seen(level, "y" in plot.log):
            axes.axhline(level, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            place = axes.get_yaxis_transform()
            axes.text(0.995, level, name, transform=place, ha="right", va="bottom", fontsize=7.5, color=INK)


def _dress(axes: "Axes", plot: Plot) -> None:
    points = [point for line in plot.lines for point in drawable(line, plot.log)]
    if points and "x" in plot.log:
        axes.set_xscale("log")
        _ticks_at([point[0] for point in points], axes)
    if points and "y" in plot.log:
        axes.set_yscale("log")
        _plain_numbers(axes, [value for point in points for value in point[1:]])
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(visible=True, color=FAINT, linewidth=0.5, alpha=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=2.5)
    if len(plot.lines) > 1 or any(line.name for line in plot.lines):
        axes.legend(
            fontsize=7.5, labelcolor=SOFT, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2
        )


def _ticks_at(xs: Sequence[float], axes: "Axes") -> None:
    """Put ticks at the points themselves where they are few: depths and widths are powers of two."""
    values = sorted(set(xs))
    if len(values) <= 9 and all(value == int(value) and value < 1e5 for value in values):
        axes.set_xticks(values, [f"{value:.0f}" for value in values])
        axes.minorticks_off()


def _plain_numbers(axes: "Axes", ys: Sequence[float]) -> None:
    """0.5, 1, 2 rather than 5 × 10⁻¹ where the axis is short; powers of ten where it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_minor_formatter(NullFormatter())
    if max(ys) / min(ys) < 200:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    if min(ys) >= 1e-3 and max(ys) < 1e5:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))


def _small(svg: str, name: str, title: str) -> str:
    """The `<svg>` element alone, as wide as its place, its ids unlike those of the others, digits rounded."""
    from html import escape

    _, _, element = svg.partition("<svg")
    element = "<svg" + element
    element = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", element, count=1, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", element))
    element = re.sub(r' id="([^"]+)"', lambda id: f' id="{name}-{id[1]}"' if id[1] in used else "", element)
    element = re.sub(r'(url\(|href=")#', rf"\1#{name}-", element)
    element = re.sub(r"(\d+\.\d\d)\d+", r"\1", element)
    element = re.sub(r"\s*\n\s*", "\n", element)
    label = f'role="img" aria-label="{escape(title)}"'
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', label, element, count=1)
