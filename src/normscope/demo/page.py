"""The page of the demo: both plots, the conditions, and commands. One file, no network, no script."""

import math

from markupsafe import Markup

from normscope.demo.run import Story, moral
from normscope.demo.settings import CONDITIONS
from normscope.report.figures.charts import Curve, Picture, chart
from normscope.report.figures.scales import figure
from normscope.report.page import environment, style_sheet
from normscope.report.words import criterion_in_words

COLOURS = ("c-c", "c-ink", "c-a", "k-attn", "c-p7")
"""A colour for each condition; people with any colour blindness can distinguish them."""
_CEILING = 1.0  # nats above the unigram entropy; higher initial losses are cut off


def render_page(story: Story) -> str:
    """The page of a story, also of an unfinished one."""
    from normscope.pipeline import versions

    return (
        environment("normscope.demo")
        .get_template("demo.html")
        .render(
            story=story,
            settings=story.settings,
            style=Markup(style_sheet("page.css")),
            moral=moral(story),
            pictures=[_losses(story), _diversities(story)],
            rows=[_row(story, index) for index in range(len(CONDITIONS))],
            versions=", ".join(f"{name} {version}" for name, version in versions().items()),
            criterion=criterion_in_words("Trains", story.unigram_entropy),
        )
    )


def _row(story: Story, index: int) -> dict[str, object]:
    """One condition's row of the table."""
    condition, verdicts = CONDITIONS[index], story.verdicts(index)
    command = condition.command(story.settings, story.settings.seeds[0])
    if verdicts is None:
        outcome, verdict = f"step {story.step(index)} of {story.settings.steps}", "none"
    else:
        outcome = f"trains {sum(verdicts)} of {len(verdicts)}"
        verdict = "fine" if all(verdicts) else "error" if not any(verdicts) else "warning"
    return {
        "colour": COLOURS[index],
        "name": condition.name,
        "change": condition.words(story.settings),
        "losses": [f"{loss:.2f}" for loss in story.losses(index) if not math.isnan(loss)],
        "diversities": [figure(value, 1) for value in story.diversities(index) if not math.isnan(value)],
        "outcome": outcome,
        "verdict": verdict,
        "command": command,
    }


def _losses(story: Story) -> Picture:
    level = story.unigram_entropy
    top = math.inf if level is None else level + _CEILING
    curves = [
        _curve(story, index, seed, [(x, y) for x, y in course.smooth(story.settings.look) if not y > top])
        for (index, seed), course in story.courses.items()
    ]
    line = None if level is None else (level, "unigram")
    drawing = chart(curves, label="Loss by step", x_label="step", log=False, level=line, dots=False)
    about = (
        f"In nats per byte, means of {story.settings.look} steps, a line per seed. Dashed: unigram entropy "
        "of the text. A model below it has learnt more than the frequency of each byte."
    )
    return Picture("Loss", about, drawing)


def _diversities(story: Story) -> Picture:
    curves = [_curve(story, index, seed, course.looks) for (index, seed), course in story.courses.items()]
    drawing = chart(curves, label="Token diversity by step", x_label="step", log=True, dots=False)
    about = (
        "Share of the last hidden state's energy outside its mean over tokens; positions count at most "
        "half. Near 0, all tokens are the same, and attention cannot distinguish them."
    )
    return Picture("Token diversity", about, drawing)


def _curve(story: Story, index: int, seed: int, points: list[tuple[int, float]]) -> Curve:
    """One seed's line; the middle seed's line carries the name of the condition."""
    seeds = story.settings.seeds
    return Curve(
        CONDITIONS[index].name,
        COLOURS[index],
        [float(x) for x, _ in points],
        [y for _, y in points],
        label=seed == seeds[len(seeds) // 2],
    )
