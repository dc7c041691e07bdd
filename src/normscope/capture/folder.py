"""Exchange between `normscope check -- COMMAND` and the script that it started, by files in a folder."""

import json
import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.atomic import write_file, write_text

if TYPE_CHECKING:
    from normscope.report import Report

VARIABLE = "NORMSCOPE_CAPTURE"
"""Environment variable of the script's processes that holds the folder's path."""


@dataclass(frozen=True)
class Settings:
    """Options of `check` for a script; see `normscope.check` for those of the same name.

    Attributes:
        command: the script's command line, as the report names it.
        forecast, rates: whether to try other learning rates, and which; none are some around the script's.
        module: class of the module to take where several train; None takes the largest.
    """

    command: str
    steps: int = 20
    forecast: bool = False
    rates: tuple[float, ...] = ()
    try_remedies: bool = False
    budget: str = "standard"
    select: str = ""
    ignore: str = ""
    module: str | None = None
    traceback: bool = False


@dataclass(frozen=True)
class Folder:
    """The folder of one check. The script's first process writes it, normscope's own process reads it."""

    path: Path

    @staticmethod
    def of_this_process() -> "Folder | None":
        """The folder of the check that started this process; None if none did, or it has ended."""
        path = Path(os.environ.get(VARIABLE, ""))
        return Folder(path) if path.name and path.is_dir() else None

    def write_settings(self, settings: Settings) -> None:
        """Store the options for the script's processes."""
        write_text(self.path / "settings.json", json.dumps(asdict(settings)))

    def settings(self) -> Settings:
        """The stored options."""
        found = json.loads((self.path / "settings.json").read_text(encoding="utf-8"))
        return Settings(**found | {"rates": tuple(found["rates"])})

    def claim(self) -> bool:
        """Make this process the one that reports; False if another one is."""
        try:
            with (self.path / "reporter").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return (self.path / "reporter").read_text() == str(os.getpid())
        return True

    def write_report(self, report: "Report") -> None:
        """Store the report so far."""
        write_file(self.path / "report.pickle", lambda half: half.write_bytes(pickle.dumps(report)))

    def report(self) -> "Report | None":
        """The last stored report; None if there is none. It was written by our own code in our own folder."""
        path = self.path / "report.pickle"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def note(self, **facts: Any) -> None:
        """Add facts about the script: `steps`, its `failure`, the check's `progress`, `refusal` or `bug`."""
        half = self.path / f"facts.{os.getpid()}"  # not synced to the disk: it is written at each step
        half.write_text(json.dumps(self.facts() | facts), encoding="utf-8")
        half.replace(self.path / "facts.json")

    def facts(self) -> dict[str, Any]:
        """The stored facts."""
        path = self.path / "facts.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def tell(self, signal: str) -> None:
        """Tell the other processes that something has happened: "done", "more" (steps)."""
        (self.path / signal).touch()

    def told(self, signal: str) -> bool:
        """Whether `signal` was told, or the check has ended."""
        return (self.path / signal).exists() or not self.path.is_dir()
