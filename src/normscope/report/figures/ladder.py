"""Charts of a ladder: loss and token diversity at the end of each trial, by learning rate."""

import itertools
from collections.abc import Sequence

from markupsafe import Markup

from normscope.forecast import Forecast, LadderForecast
from normscope.report.figures import svg
from normscope.report.figures.charts import HEIGHT, LEFT, LOWER, RIGHT, UPPER, WIDTH, Curve, Picture, plot
from normscope.report.figures.scales import Scale, figure

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
        drawing = _chart(rungs, values, "token diversity", log=True)
        made.append(Picture("Token diversity by learning rate", about, drawing))
    return made


def outcome_class(outcome: str) -> str:
    """CSS class of an outcome, or of a remedy's status."""
    return OUTCOME_CLASSES.get(outcome, "good" if outcome == "rescues" else "fail")


def _chart(
    rungs: Sequence[Forecast], values: Sequence[float], name: str, *, log: bool, level: float | None = None
) -> Markup:
    rates = [rung.lr for rung in rungs]
    low, high = (rates[0] / 1.3, rates[0] * 1.3) if rates[0] == rates[-1] else (rates[0], rates[-1])
    across = Scale(low, high, LEFT, WIDTH - RIGHT, log=True)
    curve = Curve("", "c-ink", rates, values, label=False)
    unigram = None if level is None else (level, "unigram")
    parts = plot([curve], across, UPPER + STRIP + 8, "learning rate", log=log, level=unigram)
    strip = _strip(rungs, values, across, name)
    return svg.picture(WIDTH, HEIGHT, *parts, *strip, label=f"{name} by learning rate", css="chart")


def _strip(rungs: Sequence[Forecast], values: Sequence[float], across: Scale, name: str) -> list[Markup]:
    """Each rate's outcome as a coloured cell over the chart, and an invisible slice with its figures."""
    places = [across(rung.lr) for rung in rungs]
    between = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    edges = [LEFT - 8.0, *between, WIDTH - RIGHT + 8.0]
    parts = []
    for rung, value, left, right in zip(rungs, values, edges, edges[1:], strict=False):
        css = f"outcome {outcome_class(rung.outcome)}"
        parts.append(svg.rect(left + 0.5, UPPER, right - left - 1, STRIP, css))
        head = f"{rung.optimizer} at {rung.lr:g}: {rung.outcome}"
        area = (left, UPPER, right - left, HEIGHT - UPPER - LOWER)
        parts.append(svg.hit(*area, head, f"{name}  {figure(value, 5)}", rung.reason))
    return parts
