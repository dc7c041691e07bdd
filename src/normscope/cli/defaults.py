"""Defaults of the options from `[tool.normscope]` in the pyproject.toml of this folder or of one above."""

import tomllib
from pathlib import Path
from typing import Any

from normscope.errors import UsageError, suggest

# What `check` may take from a file. --output and --traceback belong to one call, MODEL too.
KEYS = (
    *("optimizer", "lr", "warmup", "steps", "seed", "device", "dtype", "batch_size", "seq_len", "text"),
    *("source", "target", "images"),
    *("format", "fail_on", "select", "ignore", "budget", "forecast", "rates", "try_remedies"),
)


def read_defaults(folder: Path | None = None) -> dict[str, Any]:
    """A Click default map; empty without a `[tool.normscope]` table.

    Raises:
        UsageError: the file is no TOML, or a key is unknown (with the nearest known one).
    """
    here = (folder or Path.cwd()).resolve()
    path = next(
        (p / "pyproject.toml" for p in (here, *here.parents) if (p / "pyproject.toml").is_file()), None
    )
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("normscope", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read ({error})", "a TOML file", "mend it, or run normscope elsewhere"
        ) from error
    if not isinstance(table, dict):
        raise UsageError(f"tool.normscope in {path} ({type(table).__name__})", "a table", "mend it")
    defaults = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in KEYS:
            known = [k.replace("_", "-") for k in KEYS]
            raise UsageError(
                f"[tool.normscope] {key} in {path}",
                "one of " + ", ".join(known),
                suggest(key, known, "remove it"),
            )
        defaults[name] = (
            ",".join(value) if name in ("select", "ignore") and isinstance(value, list) else value
        )
    return {"check": defaults, "anatomy": {k: v for k, v in defaults.items() if k in ANATOMY_KEYS}}


ANATOMY_KEYS = ("seed", "batch_size", "seq_len", "text", "device", "dtype")
