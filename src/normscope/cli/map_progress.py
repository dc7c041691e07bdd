"""Progress of a map: a bar on a terminal, a line every 30 s in a pipe."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from normscope.cli.progress import bar

if TYPE_CHECKING:
    from normscope.maps import Counts

LINE_SECONDS = 30.0  # between two lines in a pipe
LEAST_SHARE = 0.02  # share of the work before the time left is estimated: workers start slowly


@contextmanager
def map_progress() -> Iterator[Callable[["Counts"], None]]:
    """A `progress(counts)` that shows cells done, outcomes and time left."""
    clock = Clock()
    if not sys.stderr.isatty():
        yield _in_lines(clock)
        return
    with bar("measuring how many cells to train at once") as draw:
        yield lambda counts: draw(clock.line(counts), counts.share, 1.0)


class Clock:
    """Estimate of the time left, from the work done since the first call."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None

    def line(self, counts: "Counts") -> str:
        """One line on the progress: cells done, outcomes, time left."""
        now = time.monotonic()
        self._began = self._began or (now, counts.share)
        since, first = self._began
        done = counts.share - first
        rate = done / (now - since) if done > LEAST_SHARE and now > since else 0.0
        left = 1.0 - counts.share
        said = f"{counts.done} of {counts.total} cells, {counts.trains} train, {counts.fails} fail"
        if counts.crashed:
            said += f", {counts.crashed} crashed"
        return said + (f", about {duration(left / rate)} left" if rate > 0 and left > 0 else "")


def duration(seconds: float) -> str:
    """A time as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _in_lines(clock: Clock) -> Callable[["Counts"], None]:
    """Print a line on stderr at the start, every 30 s and at the end."""
    said = -LINE_SECONDS

    def show(counts: "Counts") -> None:
        nonlocal said
        line = clock.line(counts)
        if counts.is_finished or time.monotonic() - said > LINE_SECONDS:
            said = time.monotonic()
            print(f"map: {line}", file=sys.stderr, flush=True)

    return show
