"""Protection of code that must finish from Ctrl-C, which a terminal or `timeout` may send several times.

Python can raise KeyboardInterrupt between any two instructions, also while the last one is handled, or inside
a destructor, which loses it. These blocks prevent that. They do nothing off the main thread, or if the caller
ignores SIGINT.
"""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_PAUSE = 0.02
"""Seconds until a KeyboardInterrupt that a destructor dropped is raised again, when it has returned."""


@contextmanager
def only_once() -> Iterator[None]:
    """Let the first Ctrl-C in the block raise KeyboardInterrupt, and ignore all later ones in the block.

    Code that handles the first (restoring a model, writing a report) can therefore finish. A handler that is
    not Python's own is kept, so a nested block changes nothing. A KeyboardInterrupt in a destructor or in the
    callback of a weak reference, which Python drops, is raised again soon after.
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

    def dropped(error: "sys.UnraisableHookArgs") -> None:
        nonlocal came
        if not isinstance(error.exc_value, KeyboardInterrupt):
            hook(error)
            return
        came = False
        _thread.start_new_thread(_interrupt_soon, ())

    hook = sys.unraisablehook
    try:
        sys.unraisablehook = dropped
        signal.signal(signal.SIGINT, first)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = hook


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


class Ended(SystemExit):
    """SIGTERM or SIGHUP in `ending_in_order`; `code` is the exit status that shells give these."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `Ended`, so that processes and folders of ours go first.

    A handler that is not the default one is kept, so a nested block changes nothing.
    """
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    taken = [n for n in numbers if _in_main_thread() and signal.getsignal(n) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for each in (*taken, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    of_interrupt = signal.getsignal(signal.SIGINT)
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if taken and of_interrupt is not None:
            signal.signal(signal.SIGINT, of_interrupt)


def _interrupt_soon() -> None:
    time.sleep(_PAUSE)
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # wakes a main thread that waits
    else:
        _thread.interrupt_main()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
