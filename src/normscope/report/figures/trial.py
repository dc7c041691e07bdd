"""Charts of trials: the forecast by step, and the ends of other trials by learning rate."""

import itertools
from collections.abc import Sequence

from markupsafe import Markup

from normscope.forecast import Forecast, LadderForecast
from normscope.report.figures import svg
from normscope.report.figures.charts import (
    HEIGHT,
    LEFT,
    LINES,
    LOWER,
    RIGHT,
    UPPER,
    WIDTH,
    Curve,
    Picture,
    about_marks,
    chart,
    heat,
    is_log,
    legend,
    plot,
)
from normscope.report.figures.layout import Layout
from normscope.report.figures.scales import Scale, figure, gradient_class
from normscope.report.rescue import outcome_class
from normscope.train.optim import TITLES

STEP_CHARTS = (
    (
        "Update to weight",
        "RMS change of a step relative to RMS weight, median over matrices",
        "update_ratio",
        True,
    ),
    (
        "Gradient coherence",
        "cosine between two batches' gradients; near 1, all batches give the same gradient",
        "coherence",
        False,
    ),
)
"""Title, description, the field of a forecast's step, whether its axis is logarithmic."""
DIVERSITY = (
    "Share of the state's energy outside its mean over tokens; positions count at most half. Near 0, all "
    "tokens are the same."
)
"""Meaning of token diversity, in the words of a chart."""
STRIP = 16.0
"""Height of the strip of outcomes over a chart by learning rate."""


def forecast_charts(forecast: Forecast, layout: Layout) -> list[Picture]:
    """Token diversity, loss, update ratio, coherence and gradients by step, as far as they were measured."""
    curve = forecast.curve
    if not curve:
        return []
    xs = [float(step.step) for step in curve]
    stacks = list(dict.fromkeys(name for step in curve for name in step.diversity))
    diversities = [
        Curve(name, LINES[i % 5], xs, [step.diversity.get(name) for step in curve])
        for i, name in enumerate(stacks)
    ]
    about = f"{DIVERSITY} Log axis."
    made = _by_step("Token diversity", about, diversities, log=True) + _losses(forecast, xs)
    for title, about, name, log in STEP_CHARTS:
        seen = _seen(forecast, name)
        if len(seen) > 1:
            line = Curve("", "c-ink", [float(step) for step, _ in seen], [value for _, value in seen])
            made += _by_step(title, f"{about[:1].upper()}{about[1:]}.", [line], log=log)
    return [*made, *_gradients_by_step(forecast, layout)]


def _losses(forecast: Forecast, xs: Sequence[float]) -> list[Picture]:
    """Loss by step, and the unigram entropy of the batches trained on, or of the text where it is unknown."""
    curve, text, level = forecast.curve, forecast.baseline.loss, None
    losses = [Curve("first batch", "c-ink", xs, [step.loss for step in curve])]
    if any(step.train_loss is not None for step in curve):
        losses.append(Curve("training", "c-a", xs, [step.train_loss for step in curve]))
    if any(step.batch_entropy is not None for step in curve):
        entropies = [step.batch_entropy for step in curve]
        losses.append(Curve("unigram", "c-a", xs, entropies, dashed=True))
        about = (
            "In nats. Dashed: unigram entropy of each training batch, the lowest loss of a model that "
            "ignores the context."
        )
        about += "" if text is None else f" That of the whole text is {figure(text, 3)}."
    elif text is not None and not forecast.baseline.is_entropy:
        level = (text, "constant")
        about = "Dashed: loss of the best constant output, which ignores the input."
    elif text is None:
        about = "Loss on the batches."
    else:
        level = (text, "unigram")
        about = (
            f"In {_unit(forecast)}. Dashed: unigram entropy of the whole text, the lowest loss of a "
            "model that ignores the context; a single batch may lie below it."
        )
    log = is_log(loss for line in losses for loss in line.ys)
    about += " First batch: always the same one, without dropout." * (len(losses) > 1)
    about += " Training: the batch of each step." * any(line.name == "training" for line in losses)
    return _by_step("Loss", about + " Log axis." * log, losses, log=log, level=level)


def _unit(forecast: Forecast) -> str:
    """The unit of a cross-entropy in words."""
    return "nats" if forecast.loss_unit == 1 else f"nats × {figure(forecast.loss_unit, 3)}"


def _by_step(
    title: str, about: str, curves: Sequence[Curve], *, log: bool, level: tuple[float, str] | None = None
) -> list[Picture]:
    """The chart, if any curve has two points that a line can join."""
    if not any(len(each) > 1 for line in curves for each in line.stretches):
        return []
    drawing = chart(curves, label=f"{title} by step", x_label="step", log=log, level=level)
    return [Picture(title, about + about_marks(curves), drawing, legend(curves))]


def _seen(forecast: Forecast, name: str) -> list[tuple[int, float]]:
    """(step, value) of a quantity that is measured at some steps."""
    values = [(step.step, getattr(step, name)) for step in forecast.curve]
    return [(step, value) for step, value in values if value is not None]


def single_looks(forecast: Forecast) -> list[str]:
    """The quantities measured at one step only, in words: one point makes no chart."""
    found = []
    for title, about, name, _ in STEP_CHARTS:
        seen = _seen(forecast, name)
        if len(seen) == 1:
            found.append(f"{title} at step {seen[0][0]}: {figure(seen[0][1], 3)} ({about}).")
    return found


def _gradients_by_step(forecast: Forecast, layout: Layout) -> list[Picture]:
    """Blocks × steps, coloured as the tower is: each block's gradient relative to its stack's last block."""
    steps = [step for step in forecast.curve if step.gradients]
    rows = []
    for stack in layout.stacks if steps else ():
        last = stack.blocks[-1].block.site
        for place in stack.blocks:
            values = [(s.gradients.get(place.block.site), s.gradients.get(last)) for s in steps]
            cells = [(gradient_class(value, top), figure(value)) for value, top in values]
            name = f"{place.number}" if len(layout.stacks) == 1 else f"{stack.stack.name[:3]} {place.number}"
            rows.append((name, cells))
    if all(css == "gx" for _, cells in rows for css, _ in cells):
        return []
    drawing = heat(rows, [float(s.step) for s in steps], label="Gradient by block and step", x_label="step")
    about = "Norm over each block's weights relative to the last block's; colours as on the tower."
    return [Picture("Gradient by block", about, drawing)]


def ladder_charts(ladder: LadderForecast) -> list[Picture]:
    """Loss, and where a stack was read token diversity, at the end of the trials."""
    rungs = [rung for rung in ladder.rungs if rung.curve]
    if not rungs:
        return []
    unigram = rungs[0].baseline.loss if rungs[0].baseline.is_entropy else None
    losses = [rung.curve[-1].loss for rung in rungs]
    unit = f", in {_unit(rungs[0])}" if rungs[0].baseline.is_entropy else ""
    about = f"Loss of the first batch at the end of each trial{unit}. The strip shows each trial's outcome."
    steps = sorted({rung.last_step for rung in rungs})
    if len(steps) > 1:
        about += (
            f" Trials took {steps[0]} to {steps[-1]} steps: clear ones are shorter, the best rates and those "
            "in doubt longer. Only losses after the same number of steps are comparable."
        )
    if unigram is not None:
        about += " Dashed: unigram entropy of the text."
    log = is_log(losses)
    drawing = _chart(rungs, losses, "loss", log=log, level=unigram)
    made = [Picture("Loss by learning rate", about + " Log axis." * log, drawing)]
    diversities = [list(rung.curve[-1].diversity.values())[-1:] for rung in rungs]
    if all(diversities):
        values = [each[0] for each in diversities]
        about = f"{DIVERSITY} Log axis. The strip shows each trial's outcome."
        drawing = _chart(rungs, values, "token diversity", log=True)
        made.append(Picture("Token diversity by learning rate", about, drawing))
    return made


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
        head = f"{TITLES.get(rung.optimizer, rung.optimizer)} at {rung.lr:g}: {rung.outcome}"
        head += "" if rung.certainty is None else f", probability {rung.certainty:.2f}"
        area = (left, UPPER, right - left, HEIGHT - UPPER - LOWER)
        parts.append(svg.hit(*area, head, f"{name}  {figure(value, 5)}", rung.reason))
    return parts
