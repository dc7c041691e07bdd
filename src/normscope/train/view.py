"""Progress of a run: a bar with the loss curve on a terminal, twenty lines in a pipe."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from normscope.train.criterion import last_loss

if TYPE_CHECKING:
    from rich.progress import Progress

    from normscope.train.run import Run
    from normscope.train.trial import Trial

LINES = 20
"""Number of lines of a whole run in a pipe."""

REDRAW_SECONDS = 0.1
CURVE, SHORT_CURVE = 24, 8
"""Largest and smallest number of bars of the curve."""

WORDS, WIDE = 65, 110
"""Columns of the figures beside the curve, and of a terminal that has room for a progress bar too."""
_LEVELS = "▁▂▃▄▅▆▇█"


class View:
    """Silent view, for all processes but the first."""

    run: "Run"

    def watch(self, run: "Run") -> None:
        """Set the run to show."""
        self.run = run

    def __call__(self, trial: "Trial") -> None:
        """Called after each step."""


class Lines(View):
    """A line on stderr for each twentieth of the run."""

    def __call__(self, trial: "Trial") -> None:
        steps = trial.config.steps
        if trial.step % max(1, steps // LINES) == 0 or trial.step == steps:
            print(f"step {trial.step} of {steps}  {state_of(self.run)}", file=sys.stderr, flush=True)


class Bar(View):
    """A progress bar with the curve of the loss."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._bars = num_bars(progress.console.width)
        self._task = progress.add_task("loading", total=None)
        self._drawn = 0.0

    def __call__(self, trial: "Trial") -> None:
        now, steps = time.monotonic(), trial.config.steps
        if now - self._drawn < REDRAW_SECONDS and trial.step != steps:
            return  # drawing at each step would cost as much as a small step
        self._drawn = now
        words = f"{trial.step}/{steps}  {curve(trial.losses, self._bars)}  {state_of(self.run)}"
        self._progress.update(self._task, description=words, completed=trial.step, total=steps)


def state_of(run: "Run") -> str:
    """Loss, unigram entropy and validation loss on one line."""
    parts = [f"loss {last_loss(run.trial.losses):.3f}"]
    if run.subject.unigram_entropy is not None:
        parts.append(f"unigram {run.subject.unigram_entropy:.3f}")
    if run.validations:
        parts.append(f"validation {run.validations[-1][1]:.3f}")
    return "  ".join(parts)


def num_bars(columns: int) -> int:
    """Number of bars of the curve: leaves room for the figures and, on a wide terminal, the progress bar."""
    return CURVE if columns >= WIDE else max(SHORT_CURVE, min(CURVE, columns - WORDS))


def curve(losses: Sequence[float], bars: int = CURVE) -> str:
    """The losses as `bars` bars, each the mean of its part; × if it is not finite."""
    width = max(1, -(-len(losses) // bars))
    means = [sum(part) / len(part) for part in (losses[i : i + width] for i in range(0, len(losses), width))]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    return "".join(_LEVELS[round((m - low) / step)] if m in finite else "×" for m in means)


@contextmanager
def watching(speaks: bool) -> Iterator[View]:
    """The view for stderr: a bar on a terminal, lines in a pipe, silent unless `speaks`."""
    if not speaks:
        yield View()
        return
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), TimeRemainingColumn()]
    if console.width >= WIDE:
        columns.insert(0, BarColumn(bar_width=20))
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress)
