"""A progress bar for terminals, lines for log files, and a filter for the warnings of libraries."""

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

QUIET_SECONDS = 10.0
"""Time without a line in a log file: work of a few seconds leaves none."""


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress(stage, done, total)` that draws on stderr, or prints lines if that is not a terminal."""
    if not sys.stderr.isatty():
        with _lines() as tell:
            yield tell
        return
    from rich.progress import TimeElapsedColumn

    with bar("loading", TimeElapsedColumn()) as draw:
        yield draw


@contextmanager
def _lines() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress` of which a line every `QUIET_SECONDS` says the stage, unless the last one did.

    A thread prints them, because one stage may last for minutes.
    """
    from normscope.capture.launch import say

    latest, said, start, ended = "", "", time.monotonic(), threading.Event()

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal latest
        latest = stage

    def speak() -> None:
        nonlocal said
        while not ended.wait(QUIET_SECONDS):
            if latest != said:
                said = latest
                with suppress(OSError):  # a log that is full does not end the work
                    say(f"{said} ({time.monotonic() - start:.0f} s so far)")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


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
