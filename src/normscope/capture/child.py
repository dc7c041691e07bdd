"""The capture inside a process of the training script: it begins when the script has imported torch."""

import atexit
import contextlib
import os
import sys
import warnings

from normscope.capture.folder import Folder
from normscope.errors import describe


def begin() -> None:
    """Watch this process, if `normscope check -- COMMAND` has started it."""
    folder = Folder.of_this_process()
    if folder is None:
        return
    from normscope.capture.watcher import Watcher

    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
    watcher = Watcher(folder, folder.settings(), leave)
    watcher.events.attach()
    atexit.register(watcher.ends)


def store_failure(error: BaseException) -> bool:
    """Store the error that ended the script, for one line of the report; False if it is to be printed."""
    folder = Folder.of_this_process()
    if folder is None or isinstance(error, KeyboardInterrupt) or folder.settings().traceback:
        return False
    if "failure" not in folder.facts():
        folder.note(failure=describe(error))
    return True


def leave() -> None:
    """End this process at once, whatever the script catches or has registered for its end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed stream has nothing to lose
            stream.flush()
    os._exit(0)
