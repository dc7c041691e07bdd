"""Draw docs/images/findings/CODE.svg: the healthy and the broken model of each finding.

    PYTHONPATH=. python docs/findings/pictures.py            # all, about five minutes on two cores
    PYTHONPATH=. python docs/findings/pictures.py NS202      # one

Stops where a broken model does not get its finding, or its healthy twin does.
"""

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from cases import CASES, Case, Points
from matplotlib.ticker import MaxNLocator

FOLDER = Path(__file__).parents[1] / "images" / "findings"
HEALTHY, BROKEN, INK = "#2f6fb5", "#d95f02", "#808080"  # readable on white and on black
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "normscope",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def draw(code: str, case: Case) -> None:
    """Write the picture of one finding."""
    healthy, broken = (case.figure.points(report) for report in case.reports(code))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 2.3), layout="constrained")
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        (lines if case.figure.x else bars)(axes, case, healthy, broken)
        if case.limit is not None:
            axes.axhline(case.limit, color=INK, linestyle="--", linewidth=1)
            place, side = (1.0, "right") if case.figure.x else (0.5, "center")
            axes.annotate(
                "threshold",
                (place, case.limit),
                (0, 2),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha=side,
                va="bottom",
            )
        axes.set_title(case.figure.label, loc="left", fontsize=9, pad=20 if case.figure.x else 6)
        FOLDER.mkdir(parents=True, exist_ok=True)
        figure.savefig(FOLDER / f"{code}.svg", metadata={"Date": None})
        plt.close(figure)


def lines(axes: plt.Axes, case: Case, healthy: Points, broken: Points) -> None:
    """Both as lines over depth or steps; what is not finite is marked at the foot."""
    for name, points, colour, mark in (
        (case.healthy, healthy, HEALTHY, "o"),
        (case.broken, broken, BROKEN, "s"),
    ):
        finite = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not case.figure.log)]
        axes.plot(
            *zip(*finite, strict=True), color=colour, marker=mark, markersize=3, linewidth=1.5, label=name
        )
    ends = max(x for x, _ in healthy), max((x for x, y in broken if math.isfinite(y)), default=0)
    if ends[1] < ends[0]:
        axes.annotate(
            "not finite from here",
            (ends[1], 0),
            (4, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=BROKEN,
        )
    if case.figure.log:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(case.figure.x)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0)


def bars(axes: plt.Axes, case: Case, healthy: Points, broken: Points) -> None:
    """One figure of each, as bars with their values."""
    values = [healthy[0][1], broken[0][1]]
    drawn = axes.bar([case.healthy, case.broken], values, color=[HEALTHY, BROKEN], width=0.5)
    axes.bar_label(drawn, [f"{value:.2g}" for value in values], padding=2)
    axes.margins(y=0.2)
    axes.axhline(0, color=INK, linewidth=0.8)


if __name__ == "__main__":
    for code in sys.argv[1:] or CASES:
        draw(code, CASES[code])
        print(code, flush=True)
