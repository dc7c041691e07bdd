"""Side in a process of its own, so that two versions of the same code do not meet."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as pipe
from pathlib import Path
from typing import Any

import normscope
from normscope.compare.revisions import Revision
from normscope.compare.side import NotGivenError, Settings
from normscope.errors import NormscopeError, UsageError

GRACE_SECONDS = 3.0
_START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys; sys.path.insert(0, sys.argv[1]); import normscope; sys.path.remove(sys.argv[1]); "
    "from normscope.compare.served import serve; serve(int(sys.argv[2]))"
)
"""Program of the process: it finds this normscope, whatever the revision's folder has.

Ctrl-C reaches it too; the first process handles it, and ends this one.
"""


@dataclass(frozen=True)
class Order:
    """The first message to the process: the model, and the folder to load it in.

    Attributes:
        model: the MODEL.
        settings: how it is loaded.
        folder: its current folder, which is also first on its path.
        moved: (folder, the folder that stands for it), for paths of modules; None moves none.
    """

    model: str
    settings: Settings
    folder: Path
    moved: tuple[Path, Path] | None = None


class ProcessError(NormscopeError):
    """The error in the other process; the text is its traceback."""


class RemoteSide:
    """A model in a process of its own; the process starts at once, and loads while this one goes on.

    Args:
        spec: where the model came from, as the user wrote it.
        model: its MODEL, in the other process.
        settings: how it is loaded.
        revision: the files of the revision that it comes from; None is the files as they are.
    """

    is_saved = False

    def __init__(self, spec: str, model: str, settings: Settings, revision: Revision | None = None) -> None:
        self.spec, self._revision, self._notes = spec, revision, tuple[str, ...]()
        self._connection, theirs = pipe()
        folder = Path.cwd() if revision is None else revision.here
        moved = None if revision is None else (revision.top, revision.root / "files")
        text = None if settings.text is None else settings.text.expanduser().resolve()
        with theirs:
            self._process = _started(theirs, folder, revision is not None)
        self._is_loaded = False
        self._send(Order(model, replace(settings, text=text), folder, moved))

    def load(self) -> None:
        """Wait until the model is loaded.

        Raises:
            UsageError: it cannot be.
        """
        if not self._is_loaded:
            loaded: tuple[str, ...] = self._answer()
            known = () if self._revision is None else self._revision.notes
            self._is_loaded, self._notes = True, (*known, *loaded)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._asked("read", work, arguments)

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._asked("run", work, arguments)

    def start(self, work: Callable[..., Any], seeds: tuple[int, ...]) -> Any:
        return self._asked("start", work, (seeds,))

    def report(self) -> Mapping[str, Any]:
        raise NotGivenError("is a model, not a report")

    def reports(self, options: Mapping[str, Any], seeds: tuple[int, ...]) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self._asked("reports", None, (options, seeds))
        return found

    def close(self) -> None:
        """End the process and remove the files of the revision."""
        self._connection.close()  # a process that waits for work ends by itself
        try:
            self._process.wait(0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
            self._process.kill()
            self._process.wait()
        if self._revision is not None:
            self._revision.close()

    def _asked(self, method: str, work: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> Any:
        self.load()
        self._send((method, work, arguments))
        return self._answer()

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # a process that has ended says so in its answer
            self._connection.send_bytes(pickle.dumps(message))

    def _answer(self) -> Any:
        try:
            kind, content = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            status = self._process.wait()
            ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            do = "see its output above" if status != -9 else "make it smaller: it took too much memory"
            given = f'"{self.spec}", whose process {ended}'
            raise UsageError(given, "a model that can be loaded and run", do) from error
        if kind == "value":
            return content
        if kind == "not given":
            raise NotGivenError(content)
        if kind == "usage":
            parts, trace = content
            raise self._refused(*parts) from ProcessError(f"in the process of {self.spec}\n{trace}")
        words, trace = content
        raise RuntimeError(f"{words} in the process of {self.spec}") from ProcessError(trace)

    def _refused(self, given: str, expected: str, do: str) -> UsageError:
        if self._revision is not None:
            files = str(self._revision.root / "files")
            given, expected, do = (
                each.replace(f"{files}/", "").replace(files, ".") for each in (given, expected, do)
            )
            given = f"{given} at revision {self._revision.name}"
        return UsageError(given, expected, do)


def _started(connection: Connection, folder: Path, is_revision: bool) -> "subprocess.Popen[bytes]":
    """A Python process that serves `connection`, with `folder` as its current folder."""
    home = Path(normscope.__file__).resolve().parents[1]
    known = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    environment = dict(os.environ) | ({"PYTHONPATH": os.pathsep.join(known)} if known else {})
    if is_revision:  # a cache that is written while the folder is removed would stay behind
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    descriptor = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, str(home), str(descriptor)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(descriptor,),
    )
