"""Files of weights' names (`--map FILE`)."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normscope.errors import UsageError


class MapError(UsageError):
    """A line of the map does not fit the two models: an error of the call, so nothing is compared."""


_EXPECTED = 'a JSON or TOML file of "name of a weight of B" = "name of a weight of A"'


def read_map(path: Path) -> dict[str, str]:
    """B's name → A's name, from a JSON or TOML file; tables of TOML are joined by dots.

    Raises:
        UsageError: the file cannot be read, or is none of the two, or a value is no string.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"--map {path} ({said})", _EXPECTED, "check the path") from error
    try:
        found = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--map {path} ({error})", _EXPECTED, "fix the file") from error
    if not isinstance(found, dict):
        raise UsageError(f"--map {path} with a {type(found).__name__}", _EXPECTED, "fix the file")
    return dict(_flat(path, found, ""))


def _flat(path: Path, table: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(path, value, f"{before}{key}.")
        elif isinstance(value, str):
            yield f"{before}{key}", value
        else:
            shown = f'"{before}{key}" = {json.dumps(value, default=str)[:60]}'
            raise UsageError(f"{shown} in --map {path}", "the name of a weight of A", "fix that line")
