"""The capture inside a process of the training script: it begins when the script has imported torch."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from normscope.capture.folder import Folder
from normscope.errors import describe

POLL_SECONDS = 0.02
LAUNCHED = ("TORCHELASTIC_RUN_ID", "RANK", "ACCELERATE_MIXED_PRECISION")
"""Environment variables that a launcher of training processes sets."""


class Stopped(KeyboardInterrupt):
    """SIGTERM, by which Ctrl-C ends a script, or SIGINT, in the middle of normscope's own work."""


def begin(path: str) -> None:
    """Watch this process of the script, if `normscope check -- COMMAND` still waits for it.

    Args:
        path: the check's folder.
    """
    folder = Folder(Path(path))
    if not folder.is_watched():
        abandon(folder)
    folder.tell("torch")
    folder.note(is_launched=any(name in os.environ for name in LAUNCHED))
    from normscope.capture.watcher import Watcher

    own = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in own:  # of its sockets, which a process that is killed cannot remove
        own["tempdir"] = tempfile.mkdtemp(prefix="pymp-")
        folder.note(temporary=own["tempdir"])
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
    watcher = Watcher(folder, folder.settings(), functools.partial(leave, folder))
    watcher.events.attach()
    atexit.register(watcher.ends)
    os.register_at_fork(after_in_child=watcher.forked)


def store_failure(path: str, error: BaseException) -> bool:
    """Store the error that ended this process of the script; False if it is to be printed as well.

    It is not stored once the report is there: then normscope ends the script, whose other processes may
    notice. It is printed where the process's stderr is not the script's: somebody reads it there.
    """
    folder = Folder(Path(path))
    if not folder.is_watched():
        return False
    if folder.has("done") or isinstance(error, KeyboardInterrupt):
        return True
    trace = "".join(traceback.format_exception(error))
    folder.note(failure=describe(error), trace=trace)
    return folder.shows(2)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Context of normscope's own work in the script: SIGTERM raises Stopped once, on the main thread.

    So does SIGINT, where it would raise KeyboardInterrupt. Outside, both do what the script wants.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    taken = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        taken.append(signal.SIGINT)
    before = [signal.signal(each, stop) for each in taken]
    try:
        yield
    finally:
        for each, handler in zip(taken, before, strict=True):
            if handler is not None:  # None: it was not set by Python, and cannot be set again
                signal.signal(each, handler)


def leave(folder: Folder) -> None:
    """End this process at once, whatever the script catches or has registered for its end.

    A process that has said that it is done waits until normscope has ended those that started it: they would
    go on with the script.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed stream has nothing to lose
            stream.flush()
    while folder.has("done") and not folder.told("leave"):
        time.sleep(POLL_SECONDS)
    if not folder.is_watched():
        abandon(folder)
    os._exit(0)


def abandon(folder: Folder) -> None:
    """End this process: normscope was killed, and nobody will end the script or remove the folder."""
    folder.remove()
    os._exit(1)
