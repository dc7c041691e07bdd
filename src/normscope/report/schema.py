"""The JSON schema of a report, for whoever reads one."""

import json
from importlib.resources import files
from typing import Any


def schema() -> dict[str, Any]:
    """report/schema.json: JSON Schema (draft 2020-12) of `Report.to_dict()`, version "normscope.report/1"."""
    return json.loads((files("normscope.report") / "schema.json").read_text(encoding="utf-8"))
