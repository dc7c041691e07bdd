"""Ctrl-C that cannot break what must come to its end: several may come at once, from a terminal or `timeout`.

Python raises KeyboardInterrupt between any two instructions, in a handler of the last one too. These blocks
stand in its way; off the main thread, and where the caller ignores SIGINT, they do nothing.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def only_once() -> Iterator[None]:
    """Let the first Ctrl-C in the block raise KeyboardInterrupt, and drop all that follow it there.

    What handles the first (putting a model back, writing a report) is then left in peace. A handler that is
    not Python's own stays as it is: within another such block, nothing changes.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def first(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:
            came = True
            raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, first)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def postponed(tell: Callable[[], None]) -> Iterator[None]:
    """Postpone Ctrl-C to the end of the block; `tell()` is called at once."""
    previous = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(previous):
        yield
        return
    came = False

    def later(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        tell()

    try:
        signal.signal(signal.SIGINT, later)
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            previous(signal.SIGINT, None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
