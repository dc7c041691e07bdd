"""The demo's output in a terminal, and in a pipe."""

import math
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from normscope.cli.plot import Axes, Line, plot
from normscope.report.figure_table import FigureTable

if TYPE_CHECKING:
    from normscope.demo.run import Course, Story

COLOURS = ("red", "yellow", "cyan", "green", "magenta")
_HEIGHT, _NARROW = 13, 76
_DEEPEST = -16  # log10 of the smallest diversity that is drawn
_EVERY = 100  # steps between two lines in a pipe


def picture(story: "Story", width: int) -> Group:
    """Plots of loss and token diversity, side by side if there is room, above the table of conditions."""
    beside = width >= _NARROW
    each = (width - 3) // 2 if beside else width
    panels = [_losses(story, each), _diversities(story, each)]
    grid = Table.grid(padding=(0, 3, 0, 0))
    if beside:
        grid.add_row(*panels)
    else:
        for panel in panels:
            grid.add_row(panel)
    return Group(_head(story), Text(), grid, Text(), table(story))


def _head(story: "Story") -> Text:
    s = story.settings
    words = (
        f"{s.depth} layers, width {s.width}, AdamW at {s.lr:g}, {len(s.seeds)} seeds, bytes of Python source"
    )
    return Text.assemble(("normscope demo  ", "bold"), words, (f"  {story.seconds:.0f} s", "dim"))


def _losses(story: "Story", width: int) -> Group:
    unigram = story.unigram_entropy
    courses = [(index, course.smooth(story.settings.look)) for index, course in _from_below(story)]
    values = [loss for _, points in courses for _, loss in points if math.isfinite(loss)]
    level = unigram if unigram is not None else 3.0
    low, high = min([level - 0.5, *values]) - 0.1, level + 0.6
    ticks = [(level, "unigram", "white")] if unigram is not None else []
    ticks += [
        (tick, f"{tick:g}", "")
        for tick in (2.0, 2.5, 3.0, 3.5)
        if low < tick < high and abs(tick - level) > 0.2
    ]
    lines = [Line([(float(x), y) for x, y in points], COLOURS[index]) for index, points in courses]
    rows = plot(lines, Axes(0, story.settings.steps, low, high), width, _HEIGHT, ticks)
    return Group(_title("loss in nats", story), *rows)


def _diversities(story: "Story", width: int) -> Group:
    courses = [
        (index, [(float(x), _log10(y)) for x, y in course.looks]) for index, course in _from_below(story)
    ]
    low = min([-4.0, *(y for _, points in courses for _, y in points if math.isfinite(y))]) - 0.5
    powers = [-2.0 * k for k in range(-int(low) // 2 + 1)]
    ticks = [(power, "1" if power == 0 else f"1e{power:.0f}", "") for power in powers]
    lines = [Line(points, COLOURS[index]) for index, points in courses]
    rows = plot(lines, Axes(0, story.settings.steps, low, 0.3), width, _HEIGHT, ticks)
    return Group(_title("token diversity of the last hidden state", story), *rows)


def _from_below(story: "Story") -> list[tuple[int, "Course"]]:
    """Conditions with their runs in reverse order, so that the first is drawn on top."""
    return [(index, course) for (index, _), course in reversed(story.courses.items())]


def _title(words: str, story: "Story") -> Text:
    return Text.assemble((words, "bold"), (f"  steps 0 to {story.settings.steps}", "dim"))


def _log10(value: float) -> float:
    return max(_DEEPEST, math.log10(value)) if value > 0 else _DEEPEST


def table(story: "Story") -> FigureTable:
    """Table of the conditions: loss, token diversity and outcome."""
    from normscope.demo.settings import CONDITIONS

    found = FigureTable(
        *(Text(name, style="dim") for name in ("", "", "loss", "diversity", "")), wraps=(1, 4), box=None
    )
    for index, condition in enumerate(CONDITIONS):
        found.add_row(
            Text(f"━ {condition.name}", style=COLOURS[index]),
            condition.words(story.settings),
            figures(story.losses(index), "{:.2f}"),
            figures(story.diversities(index), "{:.0e}"),
            outcome(story, index),
        )
    return found


def figures(values: list[float], form: str) -> str:
    """One figure per seed; "" before the first."""
    return " ".join(form.format(value) for value in values if not math.isnan(value))


def outcome(story: "Story", index: int) -> Text:
    """Number of runs of a condition that train, or the step they have reached."""
    verdicts = story.verdicts(index)
    if verdicts is None:
        return Text(f"step {story.step(index)} of {story.settings.steps}", style="dim")
    words = f"trains {sum(verdicts)} of {len(verdicts)}"
    return Text(words, style="bold green" if all(verdicts) else "bold red" if not any(verdicts) else "bold")


class Lines:
    """Printer for a pipe: a line per condition every 100 steps and at its last step."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}

    def __call__(self, story: "Story") -> None:
        """Print what is new."""
        from normscope.demo.settings import CONDITIONS

        for index, condition in enumerate(CONDITIONS):
            step = story.step(index)
            due = step == story.settings.steps or step >= self._said.get(index, 0) + _EVERY
            if due and step > self._said.get(index, 0):
                self._said[index] = step
                losses = figures(story.losses(index), "{:.2f}")
                diversities = figures(story.diversities(index), "{:.0e}")
                print(
                    f"{condition.name:<11}  step {step:>3}  loss {losses}  diversity {diversities}",
                    flush=True,
                )
