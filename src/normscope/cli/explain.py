"""`normscope explain CODE`: the meaning of a finding."""

from typing import Annotated

import typer

from normscope.completion import complete_code


def command(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE",
            help="Code or name of a finding: NS101, post-ln-deep.",
            autocompletion=complete_code,
        ),
    ],
) -> None:
    """Explain a finding: what it means, where its threshold comes from, and what to do about it."""
    from normscope.report import print_markdown
    from normscope.rules import explain

    print_markdown(explain(code))
