"""A progress bar for terminals, and a filter for the warnings of libraries."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress(stage, done, total)` that draws on stderr; it does nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.progress import TimeElapsedColumn

    with bar("loading", TimeElapsedColumn()) as draw:
        yield draw


@contextmanager
def bar(first: str, *columns: Any) -> Iterator[Callable[[str, float, float], None]]:
    """A bar on stderr that disappears at the end; its text is `first` until the first call."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = (BarColumn(bar_width=30), TextColumn("{task.description}"), *columns)
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(first, total=None)
        yield lambda stage, done, total: progress.update(task, description=stage, completed=done, total=total)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings and log lines of libraries during the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
