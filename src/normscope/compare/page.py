"""The comparison as one self-contained HTML page, without a script."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from normscope.compare.places import Rows, sites_of
from normscope.compare.towers import Towers
from normscope.compare.types import Diff
from normscope.compare.walked import Walked, tolerance_of, walk_of
from normscope.compare.words import (
    clean,
    confirmed,
    first_parting,
    headline,
    in_order,
    listed,
    not_compared,
    outcome,
    reason,
    result,
    values,
)
from normscope.report.figures.charts import Curve, Picture, about_marks, chart
from normscope.report.figures.scales import figure
from normscope.report.html import sentence
from normscope.report.page import environment, style_sheet
from normscope.report.sites import compress
from normscope.report.words import cost_in_words

MOST_POINTS = 400
"""Points of a line; of a longer walk each is the largest of its stretch."""
TONES = {"same": "fine", "different": "error", "not compared": "untried"}


def render_html(diff: Diff, command: str | None = None) -> str:
    """The page; every word in it is escaped.

    Args:
        diff: the comparison.
        command: the shell command that made it, shown as the way to run it again.
    """
    diff = clean(diff)
    rows, towers = Rows(diff.rows), Towers(diff)
    page = (
        environment("normscope.compare")
        .get_template("diff.html")
        .render(
            diff=diff,
            style=Markup(style_sheet("page.css")),
            headline=headline(diff),
            lead=sentence(reason(diff)),
            tone=TONES[outcome(diff)],
            walk=walk_chart(diff),
            parts=[(each, result(diff, each), in_order(diff, each.part)) for each in diff.parts],
            first=first_parting(diff),
            towers=towers,
            fold=rows.fold,
            sites=sites_of,
            values=values,
            confirmed=confirmed,
            not_compared=[(listed(names), why) for names, why in not_compared(diff)],
            weights=weight_rows(diff.weights or {}),
            unmapped=unmapped(diff.weights or {}),
            cost=cost_in_words(diff.cost) if diff.cost else "",
            versions=", ".join(f"{name} {version}" for name, version in diff.versions.items()),
            rerun=command or "",
        )
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def walk_chart(diff: Diff) -> Picture | None:
    """Relative difference of the two models' tensors along the forward pass; None without a walk."""
    steps = walk_of(diff)
    if not any(step.relative is not None for step in steps):
        return None
    width = max(1, -(-len(steps) // MOST_POINTS))
    curves = [Curve("values", "c-ink", *condensed([step.relative for step in steps], width))]
    if any(step.gradient is not None for step in steps):
        gradients = condensed([step.gradient for step in steps], width)
        curves.append(Curve("gradients", "c-a", *gradients, dashed=True))
    tolerance = tolerance_of(diff)
    about = "Difference of the two, relative to their size, from the input on. Log axis."
    if tolerance is not None:
        about += f" Under {figure(tolerance, 2)} two tensors count as equal."
    parting = None if tolerance is None else _first_above(steps, tolerance)
    if parting is not None:
        at, step = parting
        curves.append(Curve("first", "c-c", [at], [step.relative]))
        name = " of ".join(filter(None, [step.name, step.a or step.b]))
        about += f" The dot marks the first that parts: {name}."
    label = "Relative difference of the two models along the forward pass"
    drawing = chart(
        curves,
        label=label,
        x_label="tensor of the forward pass",
        log=True,
        level=None if tolerance is None else (tolerance, "tolerance"),
        dots=len(steps) <= 64,
    )
    return Picture("Where the two part", about + about_marks(curves), drawing)


def condensed(values: list[float | None], width: int) -> tuple[list[float], list[float | None]]:
    """Number and value of the largest of each stretch of `width`."""
    xs: list[float] = []
    ys: list[float | None] = []
    for start in range(0, len(values), width):
        known = [value for value in values[start : start + width] if value is not None]
        xs.append(float(start + 1))
        ys.append(max(known, key=lambda value: (value != value, value)) if known else None)
    return xs, ys


def _first_above(steps: list[Walked], tolerance: float) -> tuple[float, Walked] | None:
    found = (
        (float(number), step)
        for number, step in enumerate(steps, 1)
        if step.relative is not None and not step.relative <= tolerance
    )
    return next(found, None)


def weight_rows(weights: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(weight of B, weights of A, how it was made of them)."""
    found = []
    for name, made in (weights.get("made_from") or {}).items():
        of, how = (made.get("from"), made.get("how")) if isinstance(made, Mapping) else made
        found.append(
            (str(name), of if isinstance(of, str) else ", ".join(map(str, of or ())), str(how or ""))
        )
    return found


def unmapped(weights: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """(what, how many, their names) of the weights that a reader must know."""
    names = {
        "only_a": "only in A",
        "only_b": "only in B",
        "guessed": "mapped by shape or value alone: a guess",
    }
    return [
        (words, len(weights[key]), compress(map(str, weights[key]), 12))
        for key, words in names.items()
        if weights.get(key)
    ]
