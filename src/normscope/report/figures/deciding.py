"""The one figure that decides: what the verdict rests on, drawn."""

from collections.abc import Sequence
from typing import Any

from normscope.report.figures.branches import KIND_CSS
from normscope.report.figures.charts import LINES, Curve, Picture, chart, legend
from normscope.report.figures.layout import Layout, StackPlace
from normscope.report.figures.ledger import Ledger
from normscope.rules import Finding, Severity

_OF_OUTCOME = {"collapses": "Token diversity"}
"""Title of the forecast's chart that decides; the loss for all other outcomes."""
_LOG = 20.0  # largest value over the smallest, from which on the axis is logarithmic


def deciding(
    report: Any, charts: Sequence[Picture], layout: Layout, ledger: Ledger
) -> tuple[Picture | None, list[Picture]]:
    """The figure that the verdict rests on, and the other charts of the forecast.

    For a trial that fails it is the trial's: token diversity by step for a collapse, else the loss beside the
    unigram entropy. Otherwise the worst finding's evidence by block, and without one the loss.
    """
    trial = report.forecast
    failed = trial is not None and trial.failed
    worst = None if failed else _worst(report.findings)
    drawn = None if worst is None else by_depth(worst, layout, ledger)
    if drawn is not None:
        return drawn, list(charts)
    titles = [_OF_OUTCOME[trial.outcome]] if trial is not None and trial.outcome in _OF_OUTCOME else []
    chosen = next((each for title in [*titles, "Loss"] for each in charts if each.title == title), None)
    return chosen, [each for each in charts if each is not chosen]


def _worst(findings: Sequence[Finding]) -> Finding | None:
    """The first of the gravest findings; notes decide nothing."""
    grave = [finding for finding in findings if str(finding.severity) != str(Severity.NOTE)]
    return min(grave, key=lambda finding: str(finding.severity) != str(Severity.ERROR), default=None)


def by_depth(finding: Finding, layout: Layout, ledger: Ledger) -> Picture | None:
    """A finding's evidence by block: each quantity that was measured at several blocks or their branches."""
    quantities = list(dict.fromkeys(row.quantity for row in finding.evidence))
    found = [
        (stack, quantity, kind, points)
        for quantity in quantities
        for stack in layout.stacks
        for kind, points in _points(quantity, stack, ledger).items()
        if len(points) > 1
    ][: len(LINES)]
    if not found:
        return None
    several = len({quantity for _, quantity, _, _ in found}) > 1
    curves = []
    for (stack, quantity, kind, points), css in zip(found, LINES, strict=False):
        names = [stack.stack.name if len(layout.stacks) > 1 else "", quantity if several else "", kind]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        curves.append(Curve(" ".join(filter(None, names)), css, xs, ys))
    values = [y for curve in curves for y in curve.ys if y is not None]
    log = min(values) > 0 and max(values) / min(values) > _LOG
    title = f"{' and '.join(dict.fromkeys(quantity for _, quantity, _, _ in found))} by block"
    about = f"{finding.code} {finding.name}: {finding.threshold}".rstrip(": .") + "."
    drawing = chart(curves, label=title, x_label="block, from the input on", log=log)
    return Picture(title, about, drawing, legend(curves))


def _points(quantity: str, stack: StackPlace, ledger: Ledger) -> dict[str, list[tuple[float, float]]]:
    """(block, value) by kind of branch, "" for figures of whole blocks."""
    points: dict[str, list[tuple[float, float]]] = {}
    for place in stack.blocks:
        sites = [("", place.block.site), *((KIND_CSS[b.kind], b.site) for b in place.block.branches)]
        for kind, site in sites:
            value = ledger.scalar(quantity, site)
            if value is not None:
                points.setdefault(kind, []).append((float(place.number), value))
    return points
