"""A check of a script in this process: the script runs under a watcher that ends it by an exception."""

import runpy
import sys
from pathlib import Path

import pytest

from normscope.capture.folder import Folder, Settings
from normscope.capture.watcher import Watcher

SCRIPTS = Path(__file__).parent / "scripts"


class Watched(Folder):
    """A folder whose check is this process."""

    def is_watched(self) -> bool:
        return True


class Left(BaseException):
    """The watcher ends the process."""


def watched(
    words: str, path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> tuple[Folder, bool]:
    """The folder of a check of the script and arguments `words`, and whether the watcher ended the script.

    A RuntimeError of the script is noted as its failure.
    """
    script, *arguments = words.split()
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [script, *arguments])

    def leave() -> None:
        raise Left

    folder = Watched(path)
    watcher = Watcher(folder, settings, leave)
    with watcher.events.attach():
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        except Left:
            return folder, True
        except RuntimeError as error:
            folder.note(failure=f"RuntimeError: {error}")
    watcher.ends()
    return folder, False
