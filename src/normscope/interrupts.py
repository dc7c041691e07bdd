"""Protection of code that must finish from Ctrl-C, which a terminal or `timeout` may send several times.

Python can raise KeyboardInterrupt between any two instructions, also while the last one is handled. These
blocks prevent that. They do nothing off the main thread, or if the caller ignores SIGINT.
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
    """Let the first Ctrl-C in the block raise KeyboardInterrupt, and ignore all later ones in the block.

    Code that handles the first (restoring a model, writing a report) can therefore finish. A handler that is
    not Python's own is kept, so a nested block changes nothing.
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
    """Postpone Ctrl-C to the end of the block, and call `tell()` at once."""
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
