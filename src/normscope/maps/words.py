"""A map as text: short numbers, settings on one line, a table for terminals."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normscope.maps.table import Panel, Point, Table, edge, excess
from normscope.train.optim import TITLES

if TYPE_CHECKING:
    from rich.text import Text

    from normscope.maps.record import Counts
    from normscope.report.figure_table import FigureTable


def short(rate: float, digits: int = 2) -> str:
    """A learning rate in short form: 3e-4, 2.6e-3, 3e-2, 0.5."""
    if rate >= 0.1:
        return f"{rate:.{digits}g}"
    mantissa, exponent = f"{rate:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def signed(nats: float) -> str:
    """Nats above (+) or below (−) the unigram entropy."""
    return f"{nats:+.2f}".replace("-", "−") if math.isfinite(nats) else "not finite"


def described(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Readable description of the settings that all cells share."""
    options = {name.removeprefix("model "): v for name, v in settings.items() if name.startswith("model ")}
    model = ", ".join([str(settings["model"]), *(f"{name} {value}" for name, value in options.items())])
    trial = f"{TITLES.get(settings['optimizer'], settings['optimizer'])}, {settings['steps']} steps"
    extras = {
        "weight_decay": (None, "weight decay {}"), "clip": (None, "gradients clipped at {}"),
        "eps": (None, "ε {}"), "schedule": ("constant", "{} schedule"), "precision": ("float32", "{}"),
        "accumulation": (1, "{} batches per step"),
    }  # fmt: skip
    for name, (usual, words) in extras.items():
        if settings.get(name, usual) != usual:
            trial += ", " + words.format(settings[name])
    data, _, _ = str(settings["data"]).rpartition(", ")
    return [("model", model), ("training", trial), ("data", data), ("device", str(settings["device"]))]


def told(panel: Panel, point: Point) -> str:
    """Description of a point's results, seed by seed."""
    depth = "" if point.depth is None else f", {point.depth} blocks"
    lines = [f"{panel.title}{depth}, learning rate {short(point.lr)}, {panel.subtitle}: {point.verdict}"]
    for record in point.records:
        if record.result is None:
            why = f": {record.reason}" if record.state == "crashed" else ""
            lines.append(f"seed {record.cell.seed}: {record.state}{why}")
            continue
        stopped = " and stopped" if record.result.stopped else ""
        certain = record.result.certain
        end = f"; {certain} after {record.result.certain_at} steps{stopped}" if certain else ""
        lines.append(f"seed {record.cell.seed}: {record.result.verdict}, {signed(excess(record))} nats{end}")
    return "\n".join(lines if point.records else [*lines, "not in the store"])


def width_of(table: Table) -> int:
    """Width in columns that the figures of `terminal_table` need."""
    names = max((len(panel.title) for panel in table.panels), default=0)
    return max(len("scheme"), names) + len("  warm-up  depth  largest") + 9 * len(table.rates)


def terminal_table(table: Table, *, figures: bool = True) -> "FigureTable":
    """Table with a row per panel and depth, a column per learning rate, and the largest rate that trains.

    Args:
        table: table of the map.
        figures: whether to show nats from the unigram entropy beside the marks; needs a wide terminal.
    """
    from normscope.report.figure_table import FigureTable

    others = ("warm-up", "depth", *map(short, table.rates), "largest")
    shown = FigureTable("scheme", *others, figures=others, box=None)
    for panel in table.panels:
        for row in panel.points:
            shown.add_row(
                panel.title,
                str(panel.warmup),
                "" if row[0].depth is None else str(row[0].depth),
                *(_cell(point, figures) for point in row),
                largest(row),
                end_section=row is panel.points[-1],
            )
    return shown


def largest(row: Sequence[Point]) -> str:
    """The largest learning rate that trains with every seed, as text; a dot before the first result."""
    rate = edge(row)
    if rate is None:
        return "none" if any(point.done for point in row) else "·"
    return short(rate)


_MARKS = {
    "trains": ("●", "bold blue"), "mixed": ("◐", "magenta"), "fails": ("○", "yellow"),
    "missing": ("·", "dim"), "crashed": ("!", "dim"),
}  # fmt: skip


def _cell(point: Point, figures: bool) -> "Text":
    from rich.text import Text

    mark, style = _MARKS[point.verdict]
    nats = signed(point.excess) if math.isfinite(point.excess) else "nan"
    return Text(f"{mark}{nats}" if figures and point.done else mark, style)


def summary(table: Table, counts: "Counts", settings: Mapping[str, Any]) -> list[str]:
    """The lines above the table of a terminal."""
    entropy = "" if table.unigram_entropy is None else f" ({table.unigram_entropy:.2f} nats)"
    lines = [f"{name:<9} {words}" for name, words in described(settings)]
    done = f"{counts.done} of {counts.total} done, {counts.trains} train, {counts.fails} fail"
    crashed = f", {counts.crashed} crashed" if counts.crashed else ""
    return [
        *lines,
        f"{'cells':<9} {done}{crashed}; seeds {', '.join(map(str, table.seeds))}",
        f"{'figures':<9} loss minus unigram entropy{entropy}, in nats; ● trains, ◐ some seeds do, ○ fails",
        "",
    ]
