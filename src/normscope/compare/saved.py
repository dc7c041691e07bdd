"""Saved reports as sides: report.json of a check, run.db of a run."""

import json
from pathlib import Path

from normscope.compare.side import SavedSide
from normscope.errors import UsageError

SCHEMAS = ("normscope.report/1", "normscope.run/1")
_EXPECTED = "the JSON report of a check (normscope.report/1) or of a run (normscope.run/1)"
_WRITE = "write one with `normscope check MODEL --format json --output report.json`"


def saved_report(path: Path) -> SavedSide:
    """The side of a JSON file.

    Raises:
        UsageError: the file cannot be read, or is no report.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f'"{path}" ({error})', _EXPECTED, _WRITE) from error
    except OSError as error:
        raise UsageError(f'"{path}" ({error.strerror or error})', _EXPECTED, "check the path") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if isinstance(found, dict) and schema in SCHEMAS:
        return SavedSide(str(path), found)
    if isinstance(found, dict) and isinstance(schema, str):
        raise UsageError(f'"{path}" with the schema {schema}', _EXPECTED, _WRITE)
    if isinstance(found, dict) and ("model_type" in found or "architectures" in found):
        raise UsageError(f'"{path}" (a config of Hugging Face)', "a MODEL", f'write "hf:{path}"')
    raise UsageError(f'"{path}" without a schema', _EXPECTED, _WRITE)


def saved_run(path: Path) -> SavedSide:
    """The side of the store of a run.

    Raises:
        UsageError: the file cannot be read, or holds no run.
    """
    from normscope.compare.runs import read_run  # the monitor's room takes a while to import
    from normscope.monitor.after import check_run

    return SavedSide(str(path), check_run(path).to_dict() | {"held": read_run(path)})
