"""A progress bar on a terminal, nothing in a pipe; and the chatter of libraries kept off the screen."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress(stage, done, total)` that draws on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Warnings and log lines of the libraries a model is built with are not what the user asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
