"""Start of a training script that is watched to its end, and the line that is said at the end."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import NoReturn

from normscope.capture.launch import command_to_start, environment_of_script
from normscope.errors import UsageError
from normscope.monitor.rescue import Rescue

VARIABLE = "NORMSCOPE_WATCH"
"""Environment variable of the script's processes that holds the settings."""
LISTENER = "NORMSCOPE_LISTENER"
"""Environment variable with the module that begins in them, see `capture/boot/sitecustomize.py`."""
HEAD = "NORMSCOPE_WATCH_HEAD"
"""Environment variable with the id of the process that says the last line."""
LONGEST_REASON = 160
"""Characters of an error in that line; the traceback above it has the rest."""


@dataclass(frozen=True)
class Settings:
    """Settings of `normscope watch -- COMMAND`.

    Attributes:
        store: absolute path of the store.
        name: the same as it was given.
        every, resume: see `Monitor`.
        module: class of the module to watch where several train; None takes the largest.
        look_every: steps between two looks at the model, which is then looked at when there is an alarm too.
        rescue: what the monitor may do, as `Rescue.named` takes it; None only watches.
        process: id of the process that becomes the command.
        started: time of the start, in seconds since the epoch.
    """

    store: str
    name: str
    every: int
    resume: bool
    module: str | None
    look_every: int | None
    rescue: str | None
    process: int
    started: float

    @staticmethod
    def given() -> "Settings":
        """The settings in the environment of this process."""
        return Settings(**json.loads(os.environ[VARIABLE]))


def start(
    words: Sequence[str],
    *,
    store: Path,
    every: int,
    resume: bool,
    overwrite: bool,
    module: str | None,
    look_every: int | None,
    rescue: str | None,
) -> NoReturn:
    """Become the command `words`: its output, signals and exit status are its own.

    Raises:
        UsageError: it cannot be started, `rescue` is none, or `store` holds a run and neither `resume` nor
            `overwrite` is True.
    """
    command = command_to_start(words)
    if rescue is not None:
        Rescue.named(rescue)
    if resume and overwrite:
        raise UsageError("--resume with --overwrite", "one of the two", "leave one out")
    if store.exists() and not resume:
        _remove(store, overwrite)
    if not store.parent.is_dir():
        raise UsageError(f'store "{store}" (its folder does not exist)', "a file in a folder", "make it")
    settings = Settings(
        str(store.absolute()), str(store), every, resume, module, look_every, rescue, os.getpid(), time.time()
    )
    environment = environment_of_script() | {
        VARIABLE: json.dumps(asdict(settings)),
        LISTENER: "normscope.monitor.script",
    }
    environment.pop(HEAD, None)
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, which a program would inherit
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        given = f'command "{command[0]}" ({error.strerror})'
        raise UsageError(given, "a program that this system can run", "check the file") from error


def _remove(store: Path, overwrite: bool) -> None:
    """Remove the store, if it holds no step or `overwrite` is True.

    Raises:
        UsageError: it stays, because it is no store of a run, or its run is wanted or still goes on.
    """
    from normscope.monitor.store import RunReader

    if store.is_dir():
        raise UsageError(f'store "{store}" (a folder)', "a file", "name a file in it with --store")
    with RunReader(store) as reader:
        last, ranks = reader.last_step, reader.ranks()
    if running := [each for each in ranks if each.state == "running" and not each.is_gone]:
        process = f"process {running[0].process.pid} on {running[0].host}"
        raise UsageError(
            f'store "{store}" (its run still goes on in {process})',
            "a file that no run writes to",
            "name another one with --store, or end that run",
        )
    if last is not None and not overwrite:
        raise UsageError(
            f'store "{store}" (it holds a run up to step {last})',
            "a new file",
            "replace it with --overwrite, go on with its run by --resume, or name another one with --store",
        )
    for suffix in ("-wal", "-shm", ""):  # the log first: it must not be taken for that of the new file
        Path(f"{store}{suffix}").unlink(missing_ok=True)


def summarize() -> None:
    """Say how the script ended, how many alarms there were and where the store is.

    The first Python process says it, at its end.
    """
    settings = Settings.given()
    path = Path(settings.store)
    ends: list[str] = []
    num_alarms = 0
    if path.exists():
        from normscope.monitor.store import ends_since

        ends, num_alarms = ends_since(path, settings.started)
    if ends:
        alarms = {0: "no alarm", 1: "1 alarm"}.get(num_alarms, f"{num_alarms} alarms")
        reason = next(filter(None, ends), "")
        said = "the script was interrupted" if reason.startswith("KeyboardInterrupt") else "the script failed"
        how = f"{said} ({shorten(reason, LONGEST_REASON, placeholder=' …')}); " if reason else ""
        say(f"{how}{alarms}; the run is in {settings.name}, and `normscope watch {settings.name}` shows it")
    elif os.getpid() == settings.process:
        why = "no steps of a model that can be" if "torch" in sys.modules else "PyTorch was not imported"
        say(f"nothing was watched: {why}")


def say(words: str) -> None:
    """Print a line on stderr, if the script has one."""
    try:
        print(f"normscope: {words}\n", end="", file=sys.stderr, flush=True)  # one write, as in capture.launch
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something else
        return
