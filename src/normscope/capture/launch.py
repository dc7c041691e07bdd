"""Start of a training script under capture, and its end with all of its processes."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.atomic import disk_refusals
from normscope.capture.folder import VARIABLE, Folder, Settings
from normscope.errors import CaptureError, UsageError
from normscope.interrupts import ending_in_order, postponed

if TYPE_CHECKING:
    from normscope.report import Report

BOOT = Path(__file__).resolve().parent / "boot"
GRACE_SECONDS = 5.0
"""Time that a script's processes have to end by themselves, before they are killed."""
POLL_SECONDS = 0.05
LOOK_SECONDS = 2.0
"""Time between two looks whether the process that reports still runs; a look reads all of /proc."""
PATIENCE_SECONDS = 60.0
"""Time without an optimizer step after which that is said."""
ENDING_SECONDS = 60.0
"""Time after `GRACE_SECONDS` for which the exit status of a script that ends by itself is waited for."""
TOLD_SECONDS = 5.0
"""Time between two lines about the steps of one stage."""
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException")
"""Errors that only say that another process has failed."""


@dataclass(frozen=True)
class Outcome:
    """The end of a captured script.

    Attributes:
        report: the report, or what there was of it; None if the model was not looked at.
        is_whole: True if the script took all steps that were asked for.
        reason: why it is not whole, in one line.
        is_interrupted: True if that was Ctrl-C.
        trace: traceback of the error that ended the script; empty if none did.
    """

    report: "Report | None"
    is_whole: bool
    reason: str = ""
    is_interrupted: bool = False
    trace: str = ""


def say(words: str) -> None:
    """Print a line of normscope's on stderr, beside the script's own."""
    # In one write: in two, as with PYTHONUNBUFFERED, a line of the script could come between them.
    print(f"normscope: {words}\n", end="", file=sys.stderr, flush=True)


def captured(
    words: Sequence[str],
    settings: Settings,
    *,
    quiet: bool = False,
    tell: Callable[[str], None] = say,
) -> Outcome:
    """Run the command `words` until its script has taken its steps, and end all of its processes.

    A word that is a Python file is run with this Python; programs beside this Python (`python`, `torchrun`,
    `accelerate`) come before those of PATH. SIGTERM and SIGHUP end the script and raise `Ended`.

    Args:
        settings: options of the check.
        quiet: whether the script's own output is dropped.
        tell: called with lines about the progress.

    Raises:
        UsageError: the command cannot be started, or has no training that can be followed.
        CaptureError: a bug of normscope inside the script.
    """
    command = command_to_start(words)
    with ending_in_order(), _folder() as folder:
        script = _Script(folder)
        try:
            with postponed(lambda: None):
                script.start(command, settings, quiet)
            tell(f"watching {settings.followed} optimizer steps of `{settings.command}`")
            script.wait(tell)
            script.wait_for_status(tell)
        except KeyboardInterrupt:
            script.end()
            return _interrupted(folder.report())
        except BaseException:
            script.end()
            raise
        report = None
        try:
            with postponed(lambda: None):  # reading the report imports PyTorch, for seconds
                script.end()
                report = folder.report()
        except KeyboardInterrupt:
            return _interrupted(report)
        return _outcome(folder, report, settings, script.status)


@contextlib.contextmanager
def _folder() -> Iterator[Folder]:
    with disk_refusals("the folder for temporary files", "set TMPDIR to one"):
        folder = Folder(Path(tempfile.mkdtemp(prefix="normscope-")).resolve())  # readable by this user only
    try:
        with folder.watch():
            yield folder
    finally:
        folder.remove()


def command_to_start(words: Sequence[str]) -> list[str]:
    """The command to start: a program that exists, and arguments.

    Raises:
        UsageError: there is no such program or script, or it cannot load normscope's hook.
    """
    first = words[0]
    if first.endswith(".py"):
        command = [sys.executable, *words]
    else:
        found = shutil.which(first, path=_search_path())
        if found is None:
            raise _not_a_program(first)
        command = [found, *words[1:]]
    if re.fullmatch(r"python[0-9.]*", Path(first).name) or first.endswith(".py"):
        _require_script(command)
    return command


def environment_of_script() -> dict[str, str]:
    """This process's environment, with which a Python process runs `boot/sitecustomize.py` at its start."""
    return os.environ | {
        "PATH": _search_path(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(BOOT), os.environ.get("PYTHONPATH")])),
    }


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _not_a_program(word: str) -> UsageError:
    path = Path(word)
    if path.is_dir():
        reason, do = "a folder", "name a script in it"
    elif os.sep in word and path.is_file():
        reason, do = "a file that is not executable", f"write python {word}, or make it executable"
    else:
        reason, do = "not found", "check its name"
    return UsageError(f'command "{word}" ({reason})', "a command such as python train.py", do)


def _require_script(command: Sequence[str]) -> None:
    """Raise UsageError unless the Python command runs a script that exists, with the site module."""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            if word.endswith(".py") and not Path(word).is_file():
                raise UsageError(f'script "{word}" (not found)', "a Python file", "check the path")
            return
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith(("-W", "-X", "--")):
            flags = re.match("-([^cm]*)([cm]?)", word)
            assert flags is not None
            for flag in "IES":
                if flag in flags[1]:
                    expected = (
                        "a Python that reads PYTHONPATH and loads sitecustomize, as normscope's hook needs"
                    )
                    raise UsageError(f"python -{flag}", expected, f"leave out -{flag}")
            if flags[2]:
                return
    raise UsageError("python without a script", "a command such as python train.py", "name the script")


@dataclass
class _Script:
    """The processes of a script: all that descend from this process, but for those that it had before."""

    folder: Folder
    process: subprocess.Popen[bytes] | None = None
    _signalled: bool = False
    _before: frozenset[int] = field(default_factory=lambda: frozenset(_descendants(os.getpid())))

    def start(self, command: Sequence[str], settings: Settings, quiet: bool) -> None:
        """Start the command.

        Raises:
            UsageError: it cannot be started.
        """
        _adopt_orphans(True)
        environment = environment_of_script() | {VARIABLE: str(self.folder.path)}
        with open(os.devnull, "wb") as nowhere:
            output = nowhere.fileno() if quiet or sys.__stderr__ is None else 2  # stdout is for the report
            with disk_refusals(f"the folder for temporary files {self.folder.path}", "set TMPDIR to one"):
                self.folder.write_settings(settings, stderr=output)
            try:
                self.process = subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            except OSError as error:
                given = f'command "{command[0]}" ({error.strerror})'
                raise UsageError(given, "a program that this system can run", "check the file") from error

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until the script ends, or the report is done, or the process that reports is lost."""
        assert self.process is not None
        said, stage, due = "", "", 0.0
        patience = time.monotonic() + PATIENCE_SECONDS
        look = time.monotonic() + LOOK_SECONDS
        while not self.folder.has("done"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_SECONDS)
            if self.process.returncode is not None:
                followed = self._is_followed()  # a script may go to the background
                time.sleep(POLL_SECONDS)
                # A look misses a process whose parent ends meanwhile.
                if self.folder.has("done") or not (followed or self._is_followed()):
                    break
            words = self.folder.facts().get("progress", "")
            is_due = time.monotonic() > due or words.partition(", step ")[0] != stage
            if words and words != said and is_due:
                said, stage = words, words.partition(", step ")[0]
                due = time.monotonic() + TOLD_SECONDS if stage != words else 0.0
                tell(words)
            elif not said and time.monotonic() > patience:
                said = f"{self._awaited()} in {PATIENCE_SECONDS:.0f} s so far; Ctrl-C ends the script"
                tell(said)
            if time.monotonic() > look:
                look = time.monotonic() + LOOK_SECONDS
                if self._has_lost_reporter():
                    break

    def wait_for_status(self, tell: Callable[[str], None]) -> None:
        """Wait until a script that ends by itself has done so: its handlers of `atexit` may take long."""
        assert self.process is not None
        if "ended" not in self.folder.facts() or self.folder.reporter() != self.process.pid:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
            return
        tell("the report is there; waiting for the script's exit status; Ctrl-C ends its process")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_SECONDS)

    def _is_followed(self) -> bool:
        """Whether the process that reports still runs, or a Python that may become it."""
        reporter, others = self.folder.reporter(), self.others()
        return reporter in others if reporter is not None else any(map(_is_python, others))

    def _has_lost_reporter(self) -> bool:
        """Whether the process that reports has ended without a report: the others would wait for it."""
        reporter, others = self.folder.reporter(), self.others()
        if reporter is None or not others or reporter in others:
            return False
        time.sleep(1.0)  # the script may end because of this
        assert self.process is not None
        return self.process.poll() is None and not self.folder.has("done")

    def _awaited(self) -> str:
        if not self.folder.has("python"):
            return "no Python that loads normscope's hook (-I, -E and -S hinder it) was started"
        return "no optimizer step" if self.folder.has("torch") else "no import of PyTorch"

    def others(self) -> set[int]:
        """The processes of the script that run."""
        return _descendants(os.getpid()) - self._before

    def end(self) -> None:
        """End all processes: let those go that are done, then politely, then by force."""
        if self.folder.has("done"):
            self._release()
        else:
            self.folder.tell("stop")
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._is_running():
                break
            self._signal(number)
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and self._is_running():
                time.sleep(POLL_SECONDS)
        _adopt_orphans(False)

    def _release(self) -> None:
        """Let the processes that are done leave; those that started them must not go on with the script.

        A launcher such as torchrun only tidies up. Other programs, such as a shell script, are killed first.
        """
        if self.process is None:
            return
        is_launched = self.folder.facts().get("is_launched", False)
        reporter, parents, others = self.folder.reporter(), _parents(), self.others()
        above = None if is_launched or reporter is None else parents.get(reporter)
        chain = []
        while above in others:
            chain.append(above)
            above = parents.get(above)
        for pid in reversed(chain):  # from above: a shell whose command was killed would go on with the next
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.folder.tell("leave")
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and (self.process.poll() is None or reporter in self.others()):
            time.sleep(POLL_SECONDS)

    def _is_running(self) -> bool:
        is_running = self.process is not None and self.process.poll() is None
        own = set() if self.process is None else {self.process.pid}  # reaped by poll(), with its exit status
        for pid in _descendants(os.getpid(), zombies=True) - self._before - self.others() - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return is_running or bool(self.others())

    @property
    def status(self) -> int | None:
        """Exit status of the process that was started.

        None if another one reports, or if we ended it before it ended by itself.
        """
        assert self.process is not None
        status = self.process.returncode
        is_its_own = self.folder.reporter() in (None, self.process.pid)
        is_by_us = self._signalled and status < 0 and "ended" not in self.folder.facts()
        return None if not is_its_own or is_by_us else status

    def _signal(self, number: int) -> None:
        self._signalled = True
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if self.process is not None and not _parents():  # this system does not list its processes
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def _adopt_orphans(wanted: bool) -> None:
    """Make this process the parent of descendants whose parent ends, where the system can (Linux)."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_child_subreaper, int(wanted), 0, 0, 0)


def _parents(*, zombies: bool = False) -> dict[int, int]:
    """Process → its parent, where the system lists these (Linux)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if zombies or state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def _descendants(root: int, *, zombies: bool = False) -> set[int]:
    parents, found, new = _parents(zombies=zombies), set[int](), {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python")
    return False


def _interrupted(report: "Report | None") -> Outcome:
    so_far = "nothing was measured yet" if report is None else "the report has the measurements so far"
    return Outcome(report, False, f"interrupted; {so_far}", is_interrupted=True)


def _outcome(folder: Folder, report: "Report | None", settings: Settings, status: int | None) -> Outcome:
    facts, failure = folder.facts(), _failure(folder)
    if "bug" in facts:
        raise CaptureError(facts["bug"], facts["place"], facts["trace"])
    if "refusal" in facts:
        raise UsageError(*facts["refusal"])
    steps, trace = folder.steps(), failure.get("trace", "")
    is_short = steps < settings.steps and "judged" not in facts
    if report is not None and "stopped" in facts and (is_short or not folder.has("done")):
        return Outcome(report, False, f"{facts['stopped']}; the report has what was seen")
    is_enough = not is_short and not failure and not status
    if folder.has("done") and report is not None and ("ended" not in facts or is_enough):
        return Outcome(report, True)
    ended = f"failed with {failure['failure']}" if failure else _ended(status)
    if report is not None:
        number = f"{steps} of {settings.steps if is_short else folder.last() or settings.followed} steps"
        reason = f"the script {ended} after {number}; the report has what was seen"
        if not failure and status == 0 and steps and is_short:
            reason += f" (--steps {steps} asks for no more)"
        return Outcome(report, False, reason, trace=trace)
    return Outcome(None, False, str(_nothing(folder, settings, ended, bool(failure))), trace=trace)


def _failure(folder: Folder) -> dict[str, Any]:
    """Facts of the process whose error says most: the reporting one, else the first that failed by itself."""
    failed = {pid: facts for pid, facts in folder.facts_by_process().items() if "failure" in facts}
    if (reporter := folder.reporter()) in failed:
        return failed[reporter]
    own = [facts for facts in failed.values() if not facts["failure"].startswith(_LAUNCHERS)]
    first = next(iter([*own, *failed.values()]), {})
    if first and not own:
        first["failure"] = first["failure"].partition(":")[0]
    return first


def _ended(status: int | None) -> str:
    if status is None:
        return "ended"
    return (
        f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    )


def _nothing(folder: Folder, settings: Settings, ended: str, has_failed: bool) -> UsageError:
    """The error of a script in which no step was seen."""
    given = f"`{settings.command}`, which {ended}"
    expected = "a script that trains a PyTorch model"
    if not folder.has("python"):
        given += " and has run no Python that loads normscope's hook"
        do = "start it with python, without its options -I, -E and -S"
        return UsageError(given, "a command that runs a training script", do)
    if has_failed:
        more = "" if settings.traceback else " (--traceback shows where it failed)"
        return UsageError(f"{given} before its first optimizer step", expected, f"fix the script{more}")
    if not folder.has("torch"):
        return UsageError(f"{given} and has not imported PyTorch", expected, "check the command")
    do = (
        "check the command; set TORCHDYNAMO_DISABLE=1 if the model runs inside a compiled function, which "
        "hides it; or give a factory that returns (model, batch, loss_fn) instead"
    )
    given += " before an optimizer step on a model"
    return UsageError(given, "a loop of forward, loss.backward() and optimizer.step()", do)
