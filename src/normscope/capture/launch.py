"""Start of a training script under capture, and its end with all of its processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.capture.folder import VARIABLE, Folder, Settings
from normscope.errors import NormscopeError, UsageError

if TYPE_CHECKING:
    from normscope.report import Report

BOOT = Path(__file__).parent / "boot"
GRACE_SECONDS = 5.0
"""Time that a script's processes have to end by themselves, before they are killed."""
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 60.0
"""Time without an optimizer step after which that is said."""
INTERRUPTED = "interrupted; the report has the measurements so far"


@dataclass(frozen=True)
class Outcome:
    """The end of a captured script.

    Attributes:
        report: the report, or what there was of it; None if the model was not looked at.
        is_whole: True if the script took all steps that were asked for.
        reason: why it is not whole, in one line.
        is_interrupted: True if that was Ctrl-C.
    """

    report: "Report | None"
    is_whole: bool
    reason: str = ""
    is_interrupted: bool = False


def captured(
    words: Sequence[str],
    settings: Settings,
    *,
    quiet: bool = False,
    tell: Callable[[str], None] = lambda words: None,
) -> Outcome:
    """Run the command `words` until its script has taken its steps, and end all of its processes.

    A word that is a Python file is run with this Python; programs beside this Python (`python`, `torchrun`,
    `accelerate`) come before those of PATH.

    Args:
        settings: options of the check.
        quiet: whether the script's own output is dropped.
        tell: called with lines about the progress.

    Raises:
        UsageError: the command cannot be started, or its model cannot be checked.
        CaptureError: a bug of normscope inside the script.
        CaptureInterrupted: Ctrl-C; its `.outcome` has what there was.
    """
    with _folder() as folder:
        folder.write_settings(settings)
        process = _started(words, folder, quiet)
        try:
            status = _waited(process, folder, tell)
        except KeyboardInterrupt as stop:
            _end(process, folder)
            raise CaptureInterrupted(Outcome(folder.report(), False, INTERRUPTED, True)) from stop
        finally:
            _end(process, folder)
        return _outcome(folder, settings, status)


class CaptureError(NormscopeError):
    """A bug of normscope inside the script; the message has the error and its place."""


class CaptureInterrupted(KeyboardInterrupt):
    """Ctrl-C during a captured script; `outcome` has what there was."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("interrupted")
        self.outcome = outcome


@contextlib.contextmanager
def _folder() -> Iterator[Folder]:
    path = Path(tempfile.mkdtemp(prefix="normscope-"))  # readable by this user only
    try:
        yield Folder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _started(words: Sequence[str], folder: Folder, quiet: bool) -> subprocess.Popen[bytes]:
    beside = str(Path(sys.executable).parent)
    environment = os.environ | {
        VARIABLE: str(folder.path),
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(BOOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, *words] if words[0].endswith(".py") else list(words)
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise UsageError(
            f'command "{words[0]}" (not found)',
            "a command that starts a training script, such as python train.py",
            "check its name",
        )
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    if command[0] == sys.executable and not Path(script).is_file():
        raise UsageError(f'script "{script}" (not found)', "a Python file", "check the path")
    output = subprocess.DEVNULL if quiet else None
    try:
        return subprocess.Popen(
            [program, *command[1:]],
            env=environment,
            stdout=output if quiet else 2,  # stdout is for the report
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        given = f'command "{words[0]}" ({error.strerror})'
        raise UsageError(given, "a program that can be run", "check the file") from error


def _waited(process: subprocess.Popen[bytes], folder: Folder, tell: Callable[[str], None]) -> int | None:
    """Wait until the script ends or the report is done; the exit status, None if it still runs."""
    said, patience = "", time.monotonic() + PATIENCE_SECONDS
    while not folder.told("done"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_SECONDS)
        words = folder.facts().get("progress", "")
        if words != said:
            said = words
            tell(words)
        elif not said and time.monotonic() > patience:
            said = f"no optimizer step in {PATIENCE_SECONDS:.0f} s so far; Ctrl-C ends the script"
            tell(said)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(GRACE_SECONDS)
    return None


def _end(process: subprocess.Popen[bytes], folder: Folder) -> None:
    """End all processes of the script: politely, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        others = _processes_of(folder)
        if process.poll() is not None and not others:
            return
        _signal(process, others, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and (process.poll() is None or _processes_of(folder)):
            time.sleep(POLL_SECONDS)


def _signal(process: subprocess.Popen[bytes], others: Sequence[int], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    for other in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(other, number)


def _processes_of(folder: Folder) -> list[int]:
    """Processes that have the folder in their environment, where the system lists those (Linux)."""
    found, mark = [], os.fsencode(f"{VARIABLE}={folder.path}")
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _outcome(folder: Folder, settings: Settings, status: int | None) -> Outcome:
    facts, report = folder.facts(), folder.report()
    if "refusal" in facts:
        raise UsageError(*facts["refusal"])
    if "bug" in facts:
        raise CaptureError(facts["bug"])
    steps = facts.get("steps", 0)
    if folder.told("done") and report is not None and "failure" not in facts:
        return Outcome(report, True)
    ended = f"failed with {facts['failure']}" if "failure" in facts else f"ended with exit status {status}"
    return Outcome(report, False, f"the script {ended} after {steps} of {settings.steps} steps")
