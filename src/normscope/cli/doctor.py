"""`normscope doctor`: versions, devices and missing parts of this installation."""

import json
from typing import Annotated

import typer

from normscope.cli.options import Output, TextOrJson
from normscope.cli.output import chosen_format, emit, require_writable


def command(
    context: typer.Context,
    format: Annotated[TextOrJson, typer.Option(help="Format of the diagnosis.")] = TextOrJson.TEXT,
    output: Output = None,
) -> int:
    """List versions, devices and missing packages, and say what each missing one disables.

    Nothing is installed, downloaded or changed.

    Exit status: 0 normscope can run; 1 something that it needs is missing or broken.
    """
    from normscope.doctor import diagnose, text_diagnosis

    require_writable(output)
    format = chosen_format(context, TextOrJson)
    diagnosis = diagnose()
    as_json = format is TextOrJson.JSON
    emit(json.dumps(diagnosis, indent=2) + "\n" if as_json else text_diagnosis(diagnosis), output)
    return int(bool(diagnosis["problems"]))
