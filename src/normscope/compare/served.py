"""Process of a RemoteSide: it loads a model, and does what it is asked."""

import contextlib
import importlib
import logging
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from normscope.compare.remote import Order
from normscope.compare.side import NotGivenError
from normscope.errors import UsageError, describe

MOST_NAMED = 5


def serve(descriptor: int) -> None:
    """Load the model that the first message names, then answer messages until the other end closes."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):  # the other process has what it wanted, or has ended
        loaded = _answered(connection, lambda: _loaded(pickle.loads(connection.recv_bytes())), _notes_of)
        while loaded is not None:
            message = pickle.loads(connection.recv_bytes())
            _answered(connection, partial(_done, loaded[0], *message), lambda value: value)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of the user's code could hold the process


def _done(side: Any, method: str, work: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> Any:
    """The value of a method of `side`; `work` is its first argument, None where it takes none."""
    return getattr(side, method)(*([] if work is None else [work]), *arguments)


def _answered(connection: Connection, work: Callable[[], Any], shown: Callable[[Any], Any]) -> Any:
    """Do `work`, send what `shown` makes of its value, or its error; return the value, None if it failed."""
    value = None
    try:
        value = work()
        answer = pickle.dumps(("value", shown(value)))
    except NotGivenError as reason:
        answer = pickle.dumps(("not given", str(reason)))
    except UsageError as error:
        parts = (error.given, error.expected, error.do)
        answer = pickle.dumps(("usage", (parts, traceback.format_exc())))
    except (Exception, SystemExit) as error:
        answer = pickle.dumps(("error", (describe(error), traceback.format_exc())))
    connection.send_bytes(answer)
    return value


def _loaded(order: Order) -> Any:
    """The side that `order` names, in this process, and notes about where its code came from."""
    from normscope.compare.sides import live_side

    if order.moved is None:
        return live_side(order.model, order.settings), ()
    move_paths(*order.moved)
    side = live_side(order.model, order.settings)
    return side, strangers(order.moved[0])


def _notes_of(loaded: Any) -> tuple[str, ...]:
    side, notes = loaded
    return (*side.notes, *notes)


def move_paths(top: Path, root: Path) -> None:
    """Let the imports from below the folder `top` come from `root`, which stands for it.

    Changed are the entries of `sys.path`, as PYTHONPATH and editable installs add them, and the tables of
    setuptools' editable installs.
    """
    sys.path[:] = [_moved(each, top, root) for each in sys.path]
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None)
        if name.startswith("__editable__") and isinstance(mapping, dict):
            mapping.update({package: _moved(path, top, root) for package, path in mapping.items()})
    importlib.invalidate_caches()


def _moved(path: str, top: Path, root: Path) -> str:
    """The path below `root` that stands for `path`, where there is one; `path` otherwise."""
    place = Path(path).resolve() if path else None
    if place is None or not place.is_relative_to(top) or is_installed(place):
        return path
    found = root / place.relative_to(top)
    return str(found) if found.exists() else path


def is_installed(path: Path) -> bool:
    """Whether `path` lies in a folder of installed packages, such as that of a .venv in the repository."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or path.is_relative_to(sys.prefix)


def strangers(top: Path) -> tuple[str, ...]:
    """A note on imported modules of the folder `top`, which are not those of the revision."""
    names = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] == "normscope":
            continue
        path = Path(file).resolve()
        if path.is_relative_to(top) and not is_installed(path):
            names.add(name.partition(".")[0])
    if not names:
        return ()
    listed = ", ".join(sorted(names)[:MOST_NAMED])
    return (f"{listed} came from the files as they are, because the revision lacks them",)
