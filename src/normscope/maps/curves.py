"""Loss curves of a map: a small plot for each scheme, warm-up and depth, a line per cell, rate as colour."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from normscope.maps.draw import FAINT, INK, SOFT
from normscope.maps.table import Panel, Point, Table
from normscope.maps.words import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PLOTS = 80  # more would take too long to draw
MOST_VERTICES = 60  # per curve; each is the mean of nearby steps


def draw_curves(table: Table, most_width: float = math.inf) -> "Figure | None":
    """The figure, for use within `rc_context(style())`; None if there are no curves, or too many.

    Args:
        table: table of the map.
        most_width: inches that the plots may take side by side; they get narrower, down to an inch.
    """
    from matplotlib.figure import Figure

    plots = len(table.panels) * len(table.depths)
    if plots > MOST_PLOTS or not any(point.done for point in table.points):
        return None
    width = min(1.9, max(1.0, (most_width - 0.8) / max(1, len(table.panels))))
    size = (0.8 + width * len(table.panels), 0.9 + 1.35 * len(table.depths))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(table.depths), len(table.panels), squeeze=False, sharex=True, sharey=True)
    top = _ceiling(table)
    for column, panel in enumerate(table.panels):
        for y, row in enumerate(reversed(panel.points)):
            _draw_plot(axes[y, column], row, table, top)
        axes[0, column].set_title(_title(panel, table), fontsize=9.5, fontweight="bold", loc="left")
        axes[-1, column].set_xlabel("step")
    for y, depth in enumerate(reversed(table.depths)):
        axes[y, 0].set_ylabel("loss" if depth is None else f"{depth} blocks\nloss")
    _draw_key(figure, table, columns=max(2, int(size[0] / 1.2)))
    return figure


def _title(panel: Panel, table: Table) -> str:
    several = len({other.warmup for other in table.panels}) > 1
    return f"{panel.title}, {panel.subtitle}" if several else panel.title


def _ceiling(table: Table) -> float:
    """Upper limit of the plots; losses far above those of an untrained model are cut off."""
    first = [r.result.losses[0] for p in table.points for r in p.done if r.result and r.result.losses]
    return 1.15 * float(np.median([loss for loss in first if np.isfinite(loss)] or [6.0]))


def _draw_plot(place: "Axes", row: Sequence[Point], table: Table, top: float) -> None:
    colours = [light for _, light, _ in rate_colours(table)]
    for x, point in enumerate(row):
        for record in point.done:
            assert record.result is not None
            place.plot(*thinned(record.result.losses), color=colours[x], linewidth=0.9, alpha=0.9)
    if table.unigram_entropy is not None:
        place.axhline(table.unigram_entropy, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
        place.set_ylim(max(0.0, table.unigram_entropy - 1.5), top)
    place.tick_params(length=2, labelsize=7, color=SOFT)
    place.grid(axis="y", color=FAINT, linewidth=0.4)
    for side in ("top", "right"):
        place.spines[side].set_visible(False)


def thinned(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps and means of parts of a curve, few enough to draw; values that are not finite are left out."""
    values = np.asarray(losses, dtype=float)
    values = values[np.isfinite(values)]
    parts = np.array_split(np.arange(len(values)), min(MOST_VERTICES, max(1, len(values))))
    parts = [part for part in parts if len(part)]
    return [float(part.mean()) + 1 for part in parts], [float(values[part].mean()) for part in parts]


def rate_colours(table: Table) -> list[tuple[str, str, str]]:
    """(variable of the style sheet, colour on a light page, colour on a dark one) of each learning rate."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    def of(share: float) -> str:
        return to_hex(colormaps["plasma"](share))

    shares = [x / max(1, len(table.rates) - 1) for x in range(len(table.rates))]
    return [(f"rate-{x}", of(0.88 * share), of(0.35 + 0.63 * share)) for x, share in enumerate(shares)]


def _draw_key(figure: "Figure", table: Table, columns: int) -> None:
    from matplotlib.lines import Line2D

    named = zip(rate_colours(table), table.rates, strict=True)
    lines = [Line2D([], [], color=light, label=short(rate)) for (_, light, _), rate in named]
    if table.unigram_entropy is not None:
        lines.append(Line2D([], [], color=INK, linestyle=(0, (4, 2)), label="unigram entropy"))
    figure.legend(handles=lines, loc="outside lower center", ncols=min(9, columns, len(lines)), frameon=False)
