"""Charts of the forecast, each with its title and description."""

from normscope.forecast import Forecast
from normscope.report.figures.charts import LINES, Curve, Picture, chart, heat
from normscope.report.figures.layout import Layout
from normscope.report.figures.scales import figure, gradient_class

STEP_CHARTS = (
    (
        "Update to weight",
        "RMS change of a step relative to RMS weight, median over matrices.",
        "update_ratio",
        True,
    ),
    (
        "Gradient coherence",
        "Cosine between two batches' gradients. Near 1: no batch has its own say.",
        "coherence",
        False,
    ),
)
"""Title, description, the field of a forecast's step, whether its axis is logarithmic."""


def forecast_charts(forecast: Forecast, layout: Layout) -> list[Picture]:
    """Diversity, loss, update ratio, coherence and gradients by step, as far as they were measured."""
    curve = forecast.curve
    if not curve:
        return []
    xs = [float(step.step) for step in curve]
    stacks = list(dict.fromkeys(name for step in curve for name in step.diversity))
    made = []
    if stacks:
        lines = [
            Curve(name, LINES[i % 5], xs, [s.diversity.get(name) for s in curve])
            for i, name in enumerate(stacks)
        ]
        drawing = chart(lines, label="Token diversity by step", x_label="step", log=True)
        made.append(
            Picture("Token diversity", "Do tokens still differ at the stack's output? Log axis.", drawing)
        )
    losses = [Curve("fixed batch", "c-ink", xs, [step.loss for step in curve])]
    if any(step.train_loss is not None for step in curve):
        losses.append(Curve("training", "c-a", xs, [step.train_loss for step in curve]))
    level = (forecast.unigram_entropy, "unigram") if forecast.unigram_entropy is not None else None
    drawing = chart(losses, label="Loss by step", x_label="step", log=False, level=level)
    about = (
        "Nats; below the unigram line the model has learnt more than letter frequencies."
        if level
        else "Loss."
    )
    made.append(Picture("Loss", about, drawing))
    for title, about, name, log in STEP_CHARTS:
        seen = [(x, getattr(s, name)) for x, s in zip(xs, curve, strict=True) if getattr(s, name) is not None]
        if len(seen) > 1:
            line = Curve("", "c-ink", [x for x, _ in seen], [y for _, y in seen])
            made.append(
                Picture(title, about, chart([line], label=f"{title} by step", x_label="step", log=log))
            )
    return [*made, *_gradients_by_step(forecast, layout)]


def single_looks(forecast: Forecast) -> list[str]:
    """The quantities measured at one step only, in words: one point makes no chart."""
    found = []
    for title, about, name, _ in STEP_CHARTS:
        seen = [
            (step.step, getattr(step, name)) for step in forecast.curve if getattr(step, name) is not None
        ]
        if len(seen) == 1:
            found.append(f"{title} at step {seen[0][0]}: {figure(seen[0][1], 3)}. {about}")
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
    if not rows:
        return []
    drawing = heat(rows, [float(s.step) for s in steps], label="Gradient by block and step", x_label="step")
    about = "Norm over each block's weights relative to the last block's; colours as on the tower."
    return [Picture("Gradient by block", about, drawing)]
