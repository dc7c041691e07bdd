"""`normscope schemes [NAME…]`: the catalogue of schemes."""

import json
from enum import StrEnum
from typing import Annotated

import typer

from normscope.cli.options import Output
from normscope.cli.output import chosen_format, emit
from normscope.completion import complete_scheme


class Format(StrEnum):
    """Output formats of the catalogue."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def command(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME…]",
            help="Schemes to show: pre deepnorm. Default: all.",
            autocompletion=complete_scheme,
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="Format of the catalogue.")] = Format.TEXT,
    output: Output = None,
) -> None:
    """List the schemes of nn: models: where each places norms and how it joins branches.

    With one name, show that scheme in full: normscope schemes deepnorm
    """
    from normscope.nn.catalogue import catalogue
    from normscope.report import page_of_schemes, print_schemes, text_schemes

    format = chosen_format(context, Format)
    rows = catalogue(names or ())
    if format is Format.JSON:
        rendered = json.dumps([row.to_dict() for row in rows], indent=2) + "\n"
    elif format is Format.MARKDOWN:
        rendered = page_of_schemes(rows)
    elif output is None:
        print_schemes(rows)
        return
    else:
        rendered = text_schemes(rows)
    emit(rendered, output)
