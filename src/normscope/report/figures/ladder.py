"""Charts of a ladder: loss and token diversity at the end of each trial, by learning rate."""

import itertools
from collections.abc import Sequence

from markupsafe import Markup

from normscope.forecast import Forecast, LadderForecast
from normscope.report.figures import svg
from normscope.report.figures.charts import HEIGHT, LEFT, LOWER, RIGHT, UPPER, WIDTH, Picture
from normscope.report.figures.scales import Scale, figure, fit, power

STRIP = 16.0
"""Height of the strip of outcomes over the chart."""
OUTCOME_CLASSES = {
    "trains": "good",
    "slow": "doubt",
    "undecided": "doubt",
    "needs-warmup": "doubt",
    "not measured": "none",
}
"""CSS class of an outcome; all others are failures."""


def ladder_charts(ladder: LadderForecast) -> list[Picture]:
    """Loss, and where a stack was read token diversity, at the end of the trials."""
    rungs = [rung for rung in ladder.rungs if rung.curve]
    if not rungs:
        return []
    unigram = rungs[0].unigram_entropy
    losses = [rung.curve[-1].loss for rung in rungs]
    about = "Nats at the end of each trial, on the fixed batch; the strip is what each trial says of the run."
    made = [Picture("Loss by learning rate", about, _chart(rungs, losses, "loss", log=False, level=unigram))]
    diversities = [list(rung.curve[-1].diversity.values())[-1:] for rung in rungs]
    if all(diversities):
        values = [each[0] for each in diversities]
        about = "Do tokens still differ at the stack's output? Log axis; the strip is what each trial says."
        drawing = _chart(rungs, values, "token diversity", log=True, level=None)
        made.append(Picture("Token diversity by learning rate", about, drawing))
    return made


def outcome_class(outcome: str) -> str:
    """CSS class of an outcome, or of a remedy's status."""
    return OUTCOME_CLASSES.get(outcome, "good" if outcome == "rescues" else "fail")


def _chart(
    rungs: Sequence[Forecast], values: Sequence[float], name: str, *, log: bool, level: float | None
) -> Markup:
    rates = [rung.lr for rung in rungs]
    low, high = rates[0], rates[-1]
    across = Scale(
        low / 1.3 if low == high else low, high * 1.3 if low == high else high, LEFT, WIDTH - RIGHT, True
    )
    top = UPPER + STRIP + 8
    up = fit([*values, *([level] if level is not None else [])], HEIGHT - LOWER, top, log=log)
    parts = [_axes(across, up, log=log)]
    if level is not None:
        parts.append(svg.line(LEFT, up(level), WIDTH - RIGHT, up(level), "ref"))
        parts.append(svg.text(WIDTH - RIGHT + 6, up(level) + 3.5, "unigram", "label soft"))
    points = [(across(rate), up(value)) for rate, value in zip(rates, values, strict=True)]
    path = "M" + " L".join(f"{svg.number(x)} {svg.number(y)}" for x, y in points)
    parts.append(svg.tag("path", d=path, class_="line c-ink"))
    parts += [svg.tag("circle", cx=x, cy=y, r=2.6, class_="dot c-ink") for x, y in points]
    parts += _strip(rungs, values, across, name)
    return svg.picture(WIDTH, HEIGHT, *parts, label=f"{name} by learning rate", css="chart")


def _axes(across: Scale, up: Scale, *, log: bool) -> Markup:
    parts = []
    for tick in up.ticks(5):
        parts.append(svg.line(LEFT, up(tick), WIDTH - RIGHT, up(tick), "grid"))
        words = power(tick) if log else f"{tick:g}"
        parts.append(svg.text(LEFT - 6, up(tick) + 3.5, words, "tick", anchor="end"))
    for tick in across.ticks(6):
        parts.append(svg.text(across(tick), HEIGHT - LOWER + 15, power(tick), "tick", anchor="middle"))
    parts.append(svg.line(LEFT, HEIGHT - LOWER, WIDTH - RIGHT, HEIGHT - LOWER, "axis"))
    middle = (across.start + across.end) / 2
    parts.append(svg.text(middle, HEIGHT - 4, "learning rate", "tick", anchor="middle"))
    return svg.group(*parts)


def _strip(rungs: Sequence[Forecast], values: Sequence[float], across: Scale, name: str) -> list[Markup]:
    """Each rate's outcome as a coloured cell over the chart, and an invisible slice with its figures."""
    places = [across(rung.lr) for rung in rungs]
    between = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    edges = [LEFT - 8.0, *between, WIDTH - RIGHT + 8.0]
    parts = []
    for rung, value, left, right in zip(rungs, values, edges, edges[1:], strict=False):
        css = f"outcome {outcome_class(rung.outcome)}"
        parts.append(svg.rect(left + 0.5, UPPER, right - left - 1, STRIP, css))
        words = f"{rung.optimizer} at {rung.lr:g}: {rung.outcome}\n{name}  {figure(value, 5)}\n{rung.reason}"
        whole = HEIGHT - UPPER - LOWER
        parts.append(svg.rect(left, UPPER, right - left, whole, "hit", svg.tag("title", words)))
    return parts
