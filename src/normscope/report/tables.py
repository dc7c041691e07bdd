"""All measurements as a few compact tables for the page: one row a site, one column a quantity."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normscope.anatomy import Anatomy
from normscope.probes import Measurement
from normscope.report.figures.scales import figure

GAINS = {
    "jacobian/sigma-max": "largest gain σ_max",
    "jacobian/sigma-min": "smallest gain σ_min",
    "jacobian/sigma-min-nonzero": "smallest gain outside the kernel",
    "jacobian/condition": "condition number κ outside the kernel",
    "jacobian/rank": "rank",
    "jacobian/effective-rank": "effective rank",
    "jacobian/stable-rank": "stable rank",
    "jacobian/log-upper-bound": "log₁₀ of the bound on σ_max by its blocks",
    "jacobian/log-lower-bound": "log₁₀ of the bound on σ_min by its blocks",
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


@dataclass(frozen=True)
class Sheet:
    """A few named figures: (name, figure in words, CSS class)."""

    title: str
    about: str
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Reason:
    """Quantities that have no figure for one reason, and at how many sites."""

    why: str
    quantities: str
    sites: str


def tabulate(anatomy: Anatomy, rows: Sequence[Measurement]) -> list[Table]:
    """The tables, whole model first, each site in the order it was first measured."""
    stacks = {f"{stack.name}{end}" for stack in anatomy.stacks for end in ("", ".input", ".hidden")}
    blocks = {block.site for block in anatomy.blocks}
    branches = {branch.site for branch in anatomy.branches}

    def where(site: str) -> str:
        if site in blocks:
            return "Blocks"
        if site in branches:
            return "Branches"
        return "Whole model and stacks" if site == "" or site in stacks else "Norms and other places"

    groups: dict[str, list[Measurement]] = {
        name: [] for name in ("Whole model and stacks", "Blocks", "Branches", "Norms and other places")
    }
    for row in rows:
        groups[where(row.site)].append(row)
    return [
        _upright(name, group) if name.startswith("Whole") else _pivot(name, group)
        for name, group in groups.items()
        if group
    ]


def number_sheets(anatomy: Anatomy, rows: Sequence[Measurement]) -> list[Sheet]:
    """The few figures of whole stacks and of the whole model's precision that a reader needs first."""
    names = [stack.name for stack in anatomy.stacks]
    gains = [r for r in rows if r.quantity in GAINS and r.site in names]
    halves = [r for r in rows if r.quantity in HALVES and r.site == ""]
    sheets = [
        Sheet("The stack as a map", "From the embedding's output to the last block's, before the final norm.",
              tuple(_line(r, GAINS[r.quantity] + (f", {r.site}" if len(names) > 1 else "")) for r in gains)),
        Sheet("Half precision", "What float16 and bfloat16 would do to the figures of this model.",
              tuple(_line(r, HALVES[r.quantity]) for r in halves)),
    ]  # fmt: skip
    return [sheet for sheet in sheets if sheet.rows]


def _line(row: Measurement, name: str) -> tuple[str, str, str]:
    if not isinstance(row.value, float | int):
        return name, row.how, "none"
    if row.quantity in SHARES:
        return name, f"{figure(100 * row.value, 3)} %", ""
    return name, figure(row.value) + ("" if row.unit in ("1", "log10") else f" {row.unit}"), ""


def not_measured(rows: Iterable[Measurement]) -> list[Reason]:
    """Everything without a figure, gathered by reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if not row.measured:
            why = row.how.removeprefix("not measured:").strip()
            found.setdefault(why, {}).setdefault(row.quantity, []).append(row.site or "whole model")
    reasons = []
    for why, quantities in found.items():
        sites = list(dict.fromkeys(site for named in quantities.values() for site in named))
        shown = ", ".join(sites[:3]) + (f" and {len(sites) - 3} more places" if len(sites) > 3 else "")
        reasons.append(Reason(why, ", ".join(quantities), shown))
    return reasons


def cell(row: Measurement | None) -> Cell:
    """A measurement in a cell: a gap says why it is one."""
    if row is None:
        return Cell("")
    if row.value is None:
        return Cell("–", "none", row.how)
    if isinstance(row.value, tuple):
        return Cell(spread(row.value), "spread")
    return Cell(figure(row.value), "" if math.isfinite(row.value) else "bad")


def spread(values: Sequence[float]) -> str:
    """A tuple in a few words: all of it up to four values, else its count and range."""
    if len(values) <= 4:
        return ", ".join(map(figure, values)) or "none"
    finite = [value for value in values if math.isfinite(value)]
    odd = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    between = f", {figure(min(finite), 3)} … {figure(max(finite), 3)}" if finite else ""
    return f"{len(values)} values{between}{odd}"


def _pivot(title: str, rows: Sequence[Measurement]) -> Table:
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    found = {(row.site, row.quantity): row for row in rows}
    units = {row.quantity: row.unit for row in rows}
    lines = tuple(
        (site, tuple(cell(found.get((site, quantity))) for quantity in quantities))
        for site in dict.fromkeys(row.site for row in rows)
    )
    columns = tuple(
        (*_split(quantity), "" if units[quantity] == "1" else units[quantity]) for quantity in quantities
    )
    return Table(title, columns, lines, _remarks(rows))


def _upright(title: str, rows: Sequence[Measurement]) -> Table:
    columns = (("", "value", ""), ("", "unit", ""), ("", "how", ""))
    lines = []
    for row in rows:
        name = f"{row.quantity} @ {row.site}" if row.site else row.quantity
        lines.append((name, (cell(row), Cell("" if row.unit == "1" else row.unit), Cell(row.how, "how"))))
    return Table(title, columns, tuple(lines), ())


def _split(quantity: str) -> tuple[str, str]:
    family, _, stat = quantity.partition("/")
    return (family, stat) if stat else ("", family)


def _remarks(rows: Sequence[Measurement]) -> tuple[str, ...]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.measured and row.how != "exact" and row.quantity not in found.setdefault(row.how, []):
            found[row.how].append(row.quantity)
    kinds = [f"{', '.join(quantities)}: {how}" for how, quantities in found.items()]
    return tuple(kinds[:6]) + ((f"and {len(kinds) - 6} more",) if len(kinds) > 6 else ())
