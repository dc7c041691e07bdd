"""The picture of a map: a panel for each scheme and warm-up, with learning rate, depth, and loss as colour.

Blue is below the unigram entropy, orange above it; both are readable without red-green vision. The main
results do not depend on colour: a dot means that every seed trains, a fraction how many do, a cross that the
loss was not finite, and the line is the largest learning rate that trains.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normscope.maps.table import Panel, Point, Table, edge
from normscope.maps.words import short, signed
from normscope.train import MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

INK, SOFT, FAINT, PAPER, CARD = "#1d2127", "#626a75", "#d9d6cf", "#fbfaf7", "#ffffff"
ON_LIGHT, ON_DARK = "#1d2128", "#fefefe"
"""Marks in a cell, whose colour is the same in both themes."""
THEMED = {INK: "ink", SOFT: "soft", FAINT: "faint", PAPER: "paper", CARD: "card"}
"""Variable of the style sheet for each colour, so that pages can have a dark theme."""
DIVERGING = (
    *("#08306b", "#1f5fa8", "#4f94cd", "#a3c8e6", "#f1efea"),
    *("#f3c48b", "#e8973e", "#bf5b17", "#7f2704"),
)
FONTS = ["DejaVu Sans"]
MOST_WIDTH = 11.0  # inches; in a wider figure letters would be too small on the page
CELL_INCHES = (0.42, 0.42)
SCALE_INCHES = 4.2  # of the scale, where the figure is as wide
LEAST_WIDTH = 6.8  # inches, for the words under the scale


def style() -> Any:
    """matplotlib's settings for both figures, for `rc_context`."""
    return {
        "font.family": FONTS, "font.size": 8.5, "text.color": INK, "axes.edgecolor": FAINT,
        "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "axes.linewidth": 0.8,
        "svg.fonttype": "none", "svg.hashsalt": "normscope", "hatch.linewidth": 0.6, "hatch.color": FAINT,
        "figure.facecolor": PAPER, "savefig.facecolor": PAPER,
    }  # fmt: skip


def draw_map(table: Table, most_width: float = MOST_WIDTH, *, key: bool = True) -> "Figure":
    """The figure, for use within `rc_context(style())`; cells have the ids cell-0, …, by panel and row.

    Args:
        table: table of the map.
        most_width: inches from which on panels go below each other.
        key: whether the words of `key_words` stand under the scale.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    inner = (CELL_INCHES[0] * max(4, len(table.rates)), CELL_INCHES[1] * max(2, len(table.depths)))
    rows, columns, places = arrangement(table.panels, inner[0] + 0.35, most_width)
    size = (
        max(LEAST_WIDTH if key else 0.0, 0.75 + columns * (inner[0] + 0.35)),
        1.1 + rows * (inner[1] + 0.95),
    )
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.03, hspace=0.06))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    colours, norm = palette(), scale(table.points)
    first = 0
    for place, panel in zip(places, table.panels, strict=True):
        _draw_panel(axes.flat[place], panel, table, colours, norm, first)
        first += len(table.rates) * len(table.depths)
    for place in set(range(axes.size)) - set(places):
        axes.flat[place].set_axis_off()
    for place in axes[:, 0]:
        if table.depths != (None,):
            place.set_ylabel("depth (blocks)")
    _draw_scale(figure, axes, ScalarMappable(norm, colours), key_words(table) if key else "")
    return figure


def arrangement(
    panels: Sequence[Panel], width: float, most_width: float = MOST_WIDTH
) -> tuple[int, int, list[int]]:
    """Rows, columns and each panel's place; each warm-up starts a new row.

    Args:
        panels: panels, ordered by warm-up.
        width: width of a panel, in inches.
        most_width: width of all of them side by side.
    """
    groups = [list(group) for _, group in itertools.groupby(panels, lambda panel: panel.warmup)]
    most = max(map(len, groups), default=1)
    lines = -(-most // max(1, int(most_width / width)))
    columns = -(-most // lines)
    places = [g * lines * columns + i for g, group in enumerate(groups) for i in range(len(group))]
    return max(1, len(groups)) * lines, columns, places


def palette() -> "Colormap":
    """Colour map from losses well under the unigram entropy to losses well above it."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("normscope", DIVERGING)


def scale(points: Sequence[Point]) -> "Normalize":
    """Colour scale centred on the unigram entropy; each side extends as far as the losses, within bounds."""
    from matplotlib.colors import TwoSlopeNorm

    found = [point.excess for point in points if math.isfinite(point.excess)] or [0.0]
    return TwoSlopeNorm(0.0, vmin=min(-0.3, min(found)), vmax=min(2.0, max(0.5, max(found))))


def _draw_panel(
    place: "Axes", panel: Panel, table: Table, colours: "Colormap", norm: "Normalize", first: int
) -> None:
    from matplotlib.patches import Rectangle

    for y, row in enumerate(panel.points):
        for x, point in enumerate(row):
            patch = Rectangle((x - 0.5, y - 0.5), 1, 1, linewidth=1.2, edgecolor=PAPER)
            patch.set_gid(f"cell-{first + y * len(row) + x}")
            _fill(patch, point, colours, norm)
            place.add_patch(patch)
            _mark(place, x, y, point, patch.get_facecolor())
    _draw_edge(place, panel)
    place.set(xlim=(-0.5, len(table.rates) - 0.5), ylim=(-0.5, len(table.depths) - 0.5))
    place.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", pad=16)
    place.text(0, 1.02, panel.subtitle, transform=place.transAxes, color=SOFT, va="bottom")
    every = -(-len(table.rates) // 8)
    place.set_xticks(range(0, len(table.rates), every), [short(r) for r in table.rates[::every]], rotation=45)
    place.set_yticks(range(len(table.depths)), ["" if d is None else str(d) for d in table.depths])
    place.tick_params(length=0, labelleft=True)
    place.set_xlabel("learning rate", labelpad=1)
    for spine in place.spines.values():
        spine.set_visible(False)


def _fill(patch: Any, point: Point, colours: "Colormap", norm: "Normalize") -> None:
    if point.verdict in ("missing", "crashed"):
        patch.set(facecolor=CARD, hatch="////" if point.verdict == "missing" else "xxxx")
        patch.set_edgecolor(FAINT)
        patch.set_linewidth(0.6)
    else:
        patch.set_facecolor(colours(norm(min(point.excess, float(norm.vmax or 0)))))


def _mark(place: "Axes", x: int, y: int, point: Point, face: Any) -> None:
    ink = ON_DARK if 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.55 else ON_LIGHT
    how: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "clip_on": True}
    if point.verdict == "trains":
        place.plot([x], [y], "o", markersize=3.2, color=ink)
    elif point.verdict == "mixed":
        place.text(x, y, f"{point.trained}/{len(point.records)}", fontsize=7, **how)
    elif point.verdict == "fails" and not math.isfinite(point.excess):
        place.plot([x], [y], "x", markersize=5, color=ink, markeredgewidth=1.3)
    elif point.verdict == "crashed":
        place.text(x, y, "!", fontsize=9, fontweight="bold", **how | {"color": INK})


def _draw_edge(place: "Axes", panel: Panel) -> None:
    """Draw a line to the right of the largest learning rate that trains, for each depth with results."""
    xs: list[float] = []
    ys: list[float] = []
    for y, row in enumerate(panel.points):
        largest = edge(row)
        x = -0.5 if largest is None else [point.lr for point in row].index(largest) + 0.5
        if not any(point.done for point in row):
            x = math.nan  # the line has a gap there
        xs += [x, x]
        ys += [y - 0.5, y + 0.5]
    place.plot(xs, ys, color=CARD, linewidth=4.2, solid_joinstyle="miter", clip_on=False, zorder=4)
    place.plot(xs, ys, color=INK, linewidth=2.2, solid_joinstyle="miter", clip_on=False, zorder=5)


def key_words(table: Table) -> str:
    """Words that explain the scale and the marks, in lines."""
    said = "" if table.unigram_entropy is None else f" ({table.unigram_entropy:.2f} nats)"
    return (
        f"final loss minus the unigram entropy{said}; dashed: {MARGIN:g} below it, where a run trains\n"
        "● every seed trains · 1/2 one of two does · × loss not finite · hatched: not trained, or ! crashed\n"
        "thick line: largest learning rate that trains"
    )


def _draw_scale(figure: "Figure", axes: Any, mappable: Any, words: str) -> None:
    length = min(1.0, SCALE_INCHES / figure.get_size_inches()[0])
    bar = figure.colorbar(
        mappable, ax=axes, location="bottom", shrink=length, aspect=42, extend="max", pad=0.03, fraction=0.05
    )
    low, high = bar.norm.vmin or -1.0, bar.norm.vmax or 1.0
    ticks = [low, low / 2, 0.0, high / 2, high]
    bar.set_ticks(ticks, labels=[signed(value) if value else "0" for value in ticks])
    bar.ax.axvline(0.0, color=ON_LIGHT, linewidth=1.8)
    bar.ax.axvline(-MARGIN, color=ON_LIGHT, linewidth=0.9, linestyle=(0, (2, 1.5)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)
    bar.set_label(words)
