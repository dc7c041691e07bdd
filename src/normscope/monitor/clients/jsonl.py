"""JSON lines: a tracker that appends a line for each step to a file."""

import json
from collections.abc import Mapping
from pathlib import Path

from normscope.errors import UsageError
from normscope.report.report import strict


class JsonLines:
    """Tracker that writes `{"step": 1, "loss": 2.5, …}` for each step.

    A figure that is not finite is the string "nan", "inf" or "-inf": JSON has no number for it, and
    `float()` reads these.

    Args:
        path: file that the lines are appended to; a line is complete on disk before the next step.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.open("a", encoding="utf-8").close()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UsageError(f'"{path}" ({reason})', "a file that can be written", "name another") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append the figures of one step."""
        line = {"step": step, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(strict(line), allow_nan=False) + "\n")
