"""Defaults of the options: `[tool.normscope]` in the pyproject.toml of this folder or of one above."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import UsageError, suggest

_LISTS = ("select", "ignore")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("lr", "weight_decay", "eps", "beta1", "beta2", "clip"), ((int, float), "a number")),
    **dict.fromkeys(("warmup", "steps", "seed", "batch_size", "seq_len"), (int, "a whole number")),
    **dict.fromkeys(("run_steps", "accumulation", "refine"), (int, "a whole number")),
    **dict.fromkeys(("forecast", "try_remedies", "quiet_script"), (bool, "true or false")),
    **dict.fromkeys(_LISTS, (str, "a string, or a list of strings")),
    **dict.fromkeys(
        ("optimizer", "schedule", "precision", "device", "dtype", "text", "source", "target", "images"),
        (str, "a string"),
    ),
    **dict.fromkeys(("format", "fail_on", "budget", "rates", "module"), (str, "a string")),
}
KEYS = tuple(_KINDS)
"""Options of `check` that the file may set: all but MODEL, --output and --traceback."""
ANATOMY_KEYS = ("seed", "batch_size", "seq_len", "text", "device", "dtype")


@dataclass(frozen=True)
class Defaults:
    """The defaults that a pyproject.toml gives.

    Attributes:
        values: option → value, for a Click default map.
        path: path of the file; None if there is none.
    """

    values: dict[str, Any]
    path: Path | None = None

    @property
    def map(self) -> dict[str, dict[str, Any]]:
        """Command → its defaults."""
        some = {key: value for key, value in self.values.items() if key in ANATOMY_KEYS}
        return {"check": self.values, "anatomy": some, "diff": some}

    def quoted(self, name: str) -> str:
        """`[tool.normscope] lr = 'fast' in PATH, line 3`."""
        assert self.path is not None
        return _quoted(self.path, name.replace("_", "-"), self.values[name])


def read_defaults(folder: Path | None = None) -> Defaults:
    """The defaults of the nearest pyproject.toml; none without a `[tool.normscope]` table.

    Raises:
        UsageError: the file is not TOML, a key is unknown (the error names the nearest known one), or a
            value has the wrong type.
    """
    path = _nearest_file(folder)
    if path is None:
        return Defaults({})
    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"{path} ({error})", "a TOML file", "fix it, or run normscope in another folder"
        ) from error
    table = tool.get("normscope", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(
            f"tool.normscope = {table!r} in {path}", "a table", "write [tool.normscope] and keys under it"
        )
    return Defaults({key.replace("-", "_"): _checked(path, key, value) for key, value in table.items()}, path)


def _nearest_file(folder: Path | None) -> Path | None:
    try:
        here = (folder or Path.cwd()).resolve()
        files = (place / "pyproject.toml" for place in (here, *here.parents))
        return next((path for path in files if path.is_file()), None)
    except OSError:  # the folder is gone or cannot be read
        return None


def _checked(path: Path, key: str, value: Any) -> Any:
    """Convert `value` to the form that the command line uses."""
    name = key.replace("-", "_")
    if name not in KEYS:
        known = [each.replace("_", "-") for each in KEYS]
        raise UsageError(
            _quoted(path, key, value),
            "one of " + ", ".join(sorted(known)),
            suggest(key, known, "remove the line"),
        )
    if name in _LISTS and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    kinds, expected = _KINDS[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise UsageError(_quoted(path, key, value), expected, "fix that line")
    return value


def _quoted(path: Path, key: str, value: Any) -> str:
    line = _line(path, key)
    return f"[tool.normscope] {key} = {value!r} in {path}" + ("" if line is None else f", line {line}")


def _line(path: Path, key: str) -> int | None:
    """Line number of a key in the table; None if the key is written in a form not searched for."""
    name = re.escape(key).replace("_", "[-_]").replace(r"\-", "[-_]")
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip().startswith("["):
            inside = re.fullmatch(r"\[\s*tool\s*\.\s*normscope\s*\]\s*(#.*)?", line.strip()) is not None
        elif inside and re.match(rf"""["']?{name}["']?\s*=""", line.strip()):
            return number
    return None
