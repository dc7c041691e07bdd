"""Protection of code that must finish from Ctrl-C, which a terminal or `timeout` may send several times.

Python can raise KeyboardInterrupt between any two instructions, also while the last one is handled, or inside
a destructor, which loses it. These blocks prevent that. They do nothing off the main thread, or if the caller
ignores SIGINT.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_PAUSE = 0.02
"""Seconds until a KeyboardInterrupt that a destructor dropped is raised again, when it has returned."""
_PATIENCE = 1.0
"""Seconds after the answer to a second Ctrl-C in which more are ignored, because a key may be held down."""
_ANSWER = "\nnormscope: still stopping, to show what there is; one more Ctrl-C ends it at once\n"


class _Presses:
    """Handler of SIGINT in `only_once`, and of those that come while `postponed` delays the first.

    Args:
        give_up: called on the last one, which must end the work.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.came = False
        self._give_up = give_up
        self._answered: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self.again()
            return
        self.came = True
        raise KeyboardInterrupt

    def again(self) -> None:
        """Answer the second one; give up on one that comes when the answer has been read."""
        now = time.monotonic()
        if self._answered is None:
            self._answered = now
            with suppress(OSError):  # not print: the signal may have come inside one
                os.write(2, _ANSWER.encode())
        elif now - self._answered > _PATIENCE:
            self._give_up()


@contextmanager
def only_once(*, ends_process: bool = False) -> Iterator[None]:
    """Let the first Ctrl-C in the block raise KeyboardInterrupt, and the second only print a line.

    Code that handles the first (restoring a model, writing a report) can therefore finish. If it does not,
    one that comes more than a second after the line raises KeyboardInterrupt again; with `ends_process`,
    which is for a block that lasts to the end of the process, it kills the process. A handler that is not
    Python's own is kept, so a nested block changes nothing. A KeyboardInterrupt in a destructor or in the
    callback of a weak reference, which Python drops, is raised again soon after.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    presses = _Presses(_end_process if ends_process else _interrupt)

    def dropped(error: "sys.UnraisableHookArgs") -> None:
        if not isinstance(error.exc_value, KeyboardInterrupt):
            hook(error)
            return
        presses.came = False
        _thread.start_new_thread(_interrupt_soon, ())

    hook = sys.unraisablehook
    try:
        sys.unraisablehook = dropped
        signal.signal(signal.SIGINT, presses)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = hook


@contextmanager
def postponed(tell: Callable[[], None]) -> Iterator[None]:
    """Postpone Ctrl-C to the end of the block, and call `tell()` at once.

    In a block of `only_once`, the second one and later ones do what they do there.
    """
    previous = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(previous):
        yield
        return
    came = False

    def later(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if isinstance(previous, _Presses) and (came or previous.came):
            previous.again()
            return
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


def _interrupt() -> None:
    raise KeyboardInterrupt


def _end_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
