"""JSON Schemas (draft 2020-12) of every JSON output, one file an output: `schema("report")`.

A document names its schema: `"schema": "normscope.report/1"` is described by report.json. The number grows
when a key is removed or changes its meaning; a key that is added leaves it.
"""

import json
from importlib.resources import files
from typing import Any

from normscope.errors import UsageError, suggest


def names() -> list[str]:
    """Names of the outputs that have a schema, sorted."""
    found = (entry.name for entry in files("normscope.schemas").iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def schema(name: str) -> dict[str, Any]:
    """The schema called `name`, or the one a document names: "report" and "normscope.report/1" are the same.

    Raises:
        UsageError: there is no such schema, or not in that version.
    """
    plain = name.removeprefix("normscope.").partition("/")[0]
    if plain not in names():
        do = suggest(plain, names(), "choose one")
        raise UsageError(f'schema "{name}"', " or ".join(names()), do)
    text = (files("normscope.schemas") / f"{plain}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    if "/" in name and name != found["$id"]:
        raise UsageError(f'schema "{name}"', found["$id"], "install the normscope that wrote the document")
    return found
