"""All measurements as a few compact tables for the page: one row a site, one column a quantity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.anatomy import Anatomy
from normscope.probes import Measurement, Measurements
from normscope.report.figures.scales import figure
from normscope.report.rounding import ABOUT, RankedPlace, first_ranked

GAINS = {
    "jacobian/sigma-max": "largest gain σ_max",
    "jacobian/sigma-min": "smallest gain σ_min",
    "jacobian/sigma-min-nonzero": "smallest gain outside the kernel",
    "jacobian/condition": "condition number κ outside the kernel",
    "jacobian/rank": "rank",
    "jacobian/effective-rank": "effective rank",
    "jacobian/stable-rank": "stable rank",
    "jacobian/log-upper-bound": "log₁₀ of the upper bound on σ_max from its blocks",
    "jacobian/log-lower-bound": "log₁₀ of the lower bound on σ_min from its blocks",
    "jacobian/dimension": "dimension",
    "jacobian/contraction": "log₁₀ gain of a random direction",
}
HALVES = {
    "precision/float16-headroom": "headroom to float16's limit",
    "precision/bfloat16-headroom": "headroom to bfloat16's limit",
    "precision/float16-flushed": "gradients that float16 flushes to zero",
    "precision/bfloat16-cosine": "cosine of float32 and bfloat16 gradients",
}
SHARES = {"precision/float16-flushed"}
NEXT_STEP = {
    "step/critical-rate": "learning rate from which the next step raises the loss",
    "step/critical-over-lr": "the same over the run's learning rate",
    "step/critical-sharpness": "critical sharpness",
    "step/lambda-max-times-lr": "λ_max · learning rate; gradient descent is stable below 2",
    "step/preconditioned-lambda-max-times-lr": "λ_max(P⁻¹H) · learning rate",
    "gradient/total": "gradient norm at the start",
}


@dataclass(frozen=True)
class Cell:
    """Content of one cell; `title` holds what does not fit."""

    words: str
    css: str = ""
    title: str = ""


@dataclass(frozen=True)
class Table:
    """Sites × quantities. `columns` are (family, stat, unit); `remarks`: how inexact figures were got."""

    title: str
    columns: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    remarks: tuple[str, ...]


def tabulate(anatomy: Anatomy, rows: Sequence[Measurement]) -> list[Table]:
    """The tables, whole model first, each site in the order it was first measured."""
    whole, rest = "Whole model and stacks", "Norms and other places"
    ends = ("", ".input", ".hidden")
    titles = {"": whole} | {f"{stack.name}{end}": whole for stack in anatomy.stacks for end in ends}
    titles |= {branch.site: "Branches" for branch in anatomy.branches}
    titles |= {block.site: "Blocks" for block in anatomy.blocks}
    groups: dict[str, list[Measurement]] = {title: [] for title in (whole, "Blocks", "Branches", rest)}
    for row in rows:
        groups[titles.get(row.site, rest)].append(row)
    return [
        _upright(title, group) if title == whole else _pivot(title, group)
        for title, group in groups.items()
        if group
    ]


def number_sheets(
    anatomy: Anatomy, rows: Sequence[Measurement]
) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """The few figures of whole stacks and of the whole model's precision that a reader needs first.

    Each sheet is (title, description, lines); a line is (name, figure in words, CSS class).
    """
    names = [stack.name for stack in anatomy.stacks]
    gains = [
        _line(row, GAINS[row.quantity] + (f", {row.site}" if len(names) > 1 else ""))
        for row in rows
        if row.quantity in GAINS and row.site in names and not over_budget(row)
    ]
    halves = [_line(row, HALVES[row.quantity]) for row in rows if row.quantity in HALVES and row.site == ""]
    steps = [
        _line(row, NEXT_STEP[row.quantity])
        for row in rows
        if row.quantity in NEXT_STEP and row.site == "" and not over_budget(row)
    ]
    about = "From the embedding's output to the last block's output, before the final norm."
    about_halves = "Effect of float16 and bfloat16 on this model's values and gradients."
    about_steps = "Predicts whether the next step raises the loss, not whether the run trains."
    places = [
        (f"{each.rounding}: {each.part} {each.site}", *_shares(each))
        for each in first_ranked(Measurements(rows))
    ]
    sheets = [
        ("Jacobian of the stack", about, gains),
        ("Half precision", about_halves, halves),
        ("The next step", about_steps, steps if any("step/" in row.quantity for row in rows) else []),
        ("Rounded alone", f"{ABOUT} The figure is the change of the output.", places),
    ]
    return [sheet for sheet in sheets if sheet[2]]


def _shares(each: RankedPlace) -> tuple[str, str]:
    """Change of the output by a rounded place, and its CSS class."""
    return each.cells[3], "none" if each.change is None else ""


def _line(row: Measurement, name: str) -> tuple[str, str, str]:
    if not isinstance(row.value, float | int):
        return name, "not measured", "none"
    if is_log_of_zero(row):
        return name.removeprefix("log₁₀ of the ").removeprefix("log₁₀ "), "0", ""
    if row.quantity in SHARES:
        return name, f"{figure(100 * row.value, 3)} %", ""
    return name, figure(row.value) + ("" if row.unit in ("1", "log10") else f" {row.unit}"), ""


def is_log_of_zero(row: Measurement) -> bool:
    """True for the logarithm of an exact zero, which is −∞ and no failure."""
    return row.unit == "log10" and row.value == -math.inf


def over_budget(row: Measurement) -> bool:
    """True for a figure that `--budget` left out."""
    return not row.measured and "--budget" in row.how


def not_measured(rows: Sequence[Measurement], budget: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Everything without a figure, gathered by reason: (quantities, sites, reason).

    All that the budget left out is one entry, the last; `budget` is the report's.
    """
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        if not row.measured and not over_budget(row):
            found.setdefault(row.how.removeprefix("not measured:").strip(), []).append(row)
    dear = [row for row in rows if over_budget(row)]
    if dear or budget.get("left_out"):
        found[_left_out(budget)] = dear
    reasons = []
    for why, gaps in found.items():
        # Sites in the order of their quantities.
        quantities = list(dict.fromkeys(gap.quantity for gap in gaps))
        gaps.sort(key=lambda gap: quantities.index(gap.quantity))
        sites = list(dict.fromkeys(gap.site or "whole model" for gap in gaps))
        reasons.append((_listed(quantities, 20, "figures"), _listed(sites, 3, "places"), why))
    return reasons


def _listed(names: Sequence[str], most: int, kind: str) -> str:
    """The first `most` names, and the number of the others."""
    more = f" and {len(names) - most} more {kind}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _left_out(budget: Mapping[str, Any]) -> str:
    """The one note on all that the budget left out."""
    name = f" {budget['name']}" if budget else ""
    parts = ", ".join(budget.get("left_out", ()))
    more = "" if name == " deep" else ". A larger --budget measures them"
    return f"--budget{name} leaves out{': ' if parts else ' figures'}{parts}{more}"


def cell(row: Measurement | None) -> Cell:
    """A measurement in a cell: a gap says why it is one."""
    if row is None:
        return Cell("")
    if row.value is None:
        return Cell("–", "none", _how(row))
    if isinstance(row.value, tuple):
        return Cell(spread(row.value), "spread")
    return Cell(figure(row.value), "" if math.isfinite(row.value) or is_log_of_zero(row) else "bad")


def _how(row: Measurement) -> str:
    """Method of measurement, or the reason why there is no figure; one note lists all over budget."""
    return "left out by the budget" if over_budget(row) else row.how


def spread(values: Sequence[float]) -> str:
    """A tuple in a few words: all of it up to four values, else its count and range."""
    if len(values) <= 4:
        return ", ".join(map(figure, values)) or "none"
    finite = [value for value in values if math.isfinite(value)]
    odd = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    between = f", {figure(min(finite), 3)} … {figure(max(finite), 3)}" if finite else ""
    return f"{len(values)} values{between}{odd}"


def _pivot(title: str, rows: Sequence[Measurement]) -> Table:
    units = {row.quantity: row.unit for row in rows}
    found = {(row.site, row.quantity): row for row in rows}
    lines = tuple(
        (site, tuple(cell(found.get((site, quantity))) for quantity in units))
        for site in dict.fromkeys(row.site for row in rows)
    )
    columns = []
    for quantity, unit in units.items():
        family, stat = quantity.split("/", 1) if "/" in quantity else ("", quantity)
        columns.append((family, stat, "" if unit == "1" else unit))
    return Table(title, tuple(columns), lines, _remarks(rows))


def _upright(title: str, rows: Sequence[Measurement]) -> Table:
    columns = (("", "value", ""), ("", "unit", ""), ("", "how", ""))
    lines = []
    for row in rows:
        name = f"{row.quantity} @ {row.site}" if row.site else row.quantity
        lines.append((name, (cell(row), Cell("" if row.unit == "1" else row.unit), Cell(_how(row), "how"))))
    return Table(title, columns, tuple(lines), ())


def _remarks(rows: Sequence[Measurement]) -> tuple[str, ...]:
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.measured and row.how != "exact":
            found.setdefault(row.how, {})[row.quantity] = None
    kinds = [f"{', '.join(quantities)}: {how}" for how, quantities in found.items()]
    return tuple(kinds[:6]) + ((f"and {len(kinds) - 6} more",) if len(kinds) > 6 else ())
