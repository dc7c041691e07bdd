"""`normscope schema [NAME]`: the JSON Schema of an output."""

import json
from typing import Annotated

import typer

from normscope.cli.options import Output
from normscope.cli.output import emit


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Name of a schema: report or normscope.report/1. Default: list all names."
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of an output. The key "schema" of an output names it."""
    from normscope.schemas import names, schema

    if name is not None:
        emit(json.dumps(schema(name), indent=2, ensure_ascii=False) + "\n", output)
        return
    found = {name: schema(name) for name in names()}
    wide, widest = max(map(len, found)), max(len(each["$id"]) for each in found.values())
    lines = (f"{name:<{wide}}  {each['$id']:<{widest}}  {each['title']}\n" for name, each in found.items())
    emit("".join(lines), output)
