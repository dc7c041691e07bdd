"""`normscope doctor`: what this machine has."""

import json
from typing import Annotated

import typer

from normscope.cli.options import Output, TextOrJson
from normscope.cli.output import emit, require_writable


def command(
    format: Annotated[TextOrJson, typer.Option(help="How to show it.")] = TextOrJson.TEXT,
    output: Output = None,
) -> int:
    """Show what this machine has: versions, devices, what is missing and what that disables.

    Exit status: 0, or 1 where something that normscope needs is missing or broken. Nothing is installed,
    downloaded or changed.
    """
    from normscope.doctor import diagnose, text_diagnosis

    require_writable(output)
    diagnosis = diagnose()
    as_json = format is TextOrJson.JSON
    emit(json.dumps(diagnosis.to_dict(), indent=2) + "\n" if as_json else text_diagnosis(diagnosis), output)
    return int(bool(diagnosis.problems))
