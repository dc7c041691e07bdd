"""Exchange between `normscope check -- COMMAND` and the script that it started, by files in a folder."""

import fcntl
import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from normscope.atomic import write_file, write_text

if TYPE_CHECKING:
    from normscope.report import Report

VARIABLE = "NORMSCOPE_CAPTURE"
"""Environment variable of the script's processes that holds the folder's path."""
WHOLE_RUN = 300
"""`normscope.train.CRITERION_STEPS`, whose package imports PyTorch."""


@dataclass(frozen=True)
class Settings:
    """Options of `check` for a script; see `normscope.check` for those of the same name.

    Attributes:
        command: the script's command line, as the report names it.
        steps: optimizer steps of the script after which its run is judged at the latest.
        forecast, rates: whether to try other learning rates, and which; none are some around the script's.
        refine: steps of longer trials of these; None leaves them to us.
        module: class of the module to take where several train; None takes the largest.
    """

    command: str
    steps: int = 20
    forecast: bool = False
    rates: tuple[float, ...] = ()
    refine: int | None = None
    try_remedies: bool = False
    budget: str = "standard"
    quantise: str = ""
    select: str = ""
    ignore: str = ""
    module: str | None = None
    traceback: bool = False

    @property
    def followed(self) -> int:
        """Optimizer steps for which the script is followed, unless its run needs a rescue.

        These are the steps of a whole run if other learning rates are tried for longer: such trials need that
        many batches of the script.
        """
        return self.whole if self.tries_longer else self.steps

    @property
    def whole(self) -> int:
        """Optimizer steps for which the script is followed where longer trials of copies need its batches."""
        return max(self.steps, WHOLE_RUN)

    @property
    def tries_longer(self) -> bool:
        """Whether other learning rates are tried for longer."""
        return (self.forecast or bool(self.rates)) and self.refine != 0


@dataclass(frozen=True)
class Folder:
    """The folder of one check. The script's processes write it, normscope's own process reads it."""

    path: Path

    def write_settings(self, settings: Settings, *, stderr: int) -> None:
        """Store the options for the script's processes.

        Args:
            stderr: the file that the script's stderr goes to. A process whose errors go elsewhere has
                somebody who reads them there.
        """
        about = os.fstat(stderr)
        stored = {"settings": asdict(settings), "stderr": [about.st_dev, about.st_ino]}
        write_text(self.path / "settings.json", json.dumps(stored))

    def _stored(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.path / "settings.json").read_text(encoding="utf-8"))
        return stored

    def settings(self) -> Settings:
        """The stored options."""
        found = self._stored()["settings"]
        return Settings(**found | {"rates": tuple(found["rates"])})

    def shows(self, descriptor: int) -> bool:
        """Whether `descriptor` of this process goes where the script's stderr goes."""
        about = os.fstat(descriptor)
        return [about.st_dev, about.st_ino] == self._stored()["stderr"]

    def watch(self) -> IO[bytes]:
        """Mark the folder as watched until the result is closed, or this process ends in any way."""
        with (self.path / "watched").open("wb") as file:
            high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)  # a script inherits 0 to 2, and would hold it
        fcntl.flock(high, fcntl.LOCK_EX)
        return os.fdopen(high, "wb")

    def is_watched(self) -> bool:
        """Whether the process that watches the folder still runs."""
        try:
            with (self.path / "watched").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def remove(self) -> None:
        """Remove the folder, and the temporary folders of the script's processes."""
        for facts in self.facts_by_process().values():
            if "temporary" in facts:
                shutil.rmtree(facts["temporary"], ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def claim(self) -> bool:
        """Make this process the one that reports; False if another one is."""
        try:
            with (self.path / "reporter").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return self.reporter() == os.getpid()
        return True

    def reporter(self) -> int | None:
        """Process that reports; None as long as there is none."""
        path = self.path / "reporter"
        number = path.read_text() if path.exists() else ""
        return int(number) if number else None

    def write_report(self, report: "Report") -> None:
        """Store the report so far."""
        write_file(self.path / "report.pickle", lambda half: half.write_bytes(pickle.dumps(report)))

    def report(self) -> "Report | None":
        """The last stored report; None if there is none. It was written by our own code in our own folder."""
        path = self.path / "report.pickle"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def note(self, **facts: Any) -> None:
        """Add facts about this process.

        The check's `progress`, `refusal` or `bug`; whether the script `ended` by itself before its last step,
        or why the check `stopped`; whether the run was `judged` before its last step, and only its
        batches are missing; the `failure` that ended this process; `trace`, its traceback or
        that of the bug; `is_launched` in a process of torchrun or accelerate; a `temporary` folder to remove.
        """
        path = self.path / f"facts-{os.getpid()}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        half = path.with_suffix(".half")
        half.write_text(json.dumps(known | facts), encoding="utf-8")
        half.replace(path)

    def count(self, steps: int) -> None:
        """Store the number of steps that were followed; this is done at each."""
        self._write_number("steps", steps)

    def steps(self) -> int:
        """Number of steps that were followed."""
        return self._number("steps")

    def follow(self, last: int) -> None:
        """Let the script take its steps up to `last`."""
        self._write_number("last", last)

    def last(self) -> int:
        """Last step of the script, where that was moved; else 0."""
        return self._number("last")

    def _write_number(self, name: str, number: int) -> None:
        """Store a number in place, which only grows; this takes no file of its own and no rename."""
        file = os.open(self.path / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, b"%d" % number, 0)
        finally:
            os.close(file)

    def _number(self, name: str) -> int:
        path = self.path / name
        return int(path.read_bytes() or 0) if path.exists() else 0

    def facts_by_process(self) -> dict[int, dict[str, Any]]:
        """The facts of each process, in the order in which they last changed."""
        paths = sorted(self.path.glob("facts-*.json"), key=lambda path: path.stat().st_mtime_ns)
        return {
            int(path.stem.removeprefix("facts-")): json.loads(path.read_text(encoding="utf-8"))
            for path in paths
        }

    def facts(self) -> dict[str, Any]:
        """The facts of all processes together; where several have one, the latest counts."""
        return {name: value for each in self.facts_by_process().values() for name, value in each.items()}

    def tell(self, signal: str) -> None:
        """Tell the other processes that something has happened.

        "python": Python has loaded the hook; "torch": it was imported; "stop": the check was
        interrupted; "done": the report is there; "leave": the script's processes may end.
        """
        (self.path / signal).touch()

    def has(self, signal: str) -> bool:
        """Whether `signal` was told."""
        return (self.path / signal).exists()

    def told(self, signal: str) -> bool:
        """Whether `signal` was told, or nobody watches any more."""
        return self.has(signal) or not self.is_watched()
