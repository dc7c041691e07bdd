"""`normscope explain CODE`: the meaning of a finding, or of a difference that `diff` names."""

from typing import Annotated

import typer

from normscope.completion import complete_code


def command(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE",
            help="Code or name of a finding: NS101, post-ln-deep; or a name from diff: norm-eps.",
            autocompletion=complete_code,
        ),
    ],
) -> None:
    """Explain a finding: what it means, where its threshold comes from, and what to do about it."""
    from normscope.compare.facts import NAMES
    from normscope.report import print_markdown
    from normscope.rules import explain

    if (name := code.strip().lower()) in NAMES:
        print_markdown(
            f"# {name}\n\n{NAMES[name]}\n\n`normscope diff` names this difference of two models.\n"
        )
    else:
        print_markdown(explain(code))
