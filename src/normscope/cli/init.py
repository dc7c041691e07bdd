"""`normscope init [PATH]`: the factory for the model that is found."""

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.output import emit, require_writable
from normscope.errors import UsageError


def command(
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="A folder with Python files, or one.")
    ] = Path(),
    class_: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="The class to take; the likeliest by default."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a stub that is there.")] = False,
) -> None:
    """Find the model in your code and write normscope_model.py, a factory that `normscope check` takes.

    Your files are read, not imported or run. A value that the code does not give stands in the stub as TODO.
    """
    from normscope.starter import start

    found = start(path, class_)
    if found.path.exists() and not force:
        raise UsageError(
            f'"{found.path}" (exists)', "a stub that is still to be written", "edit it, or give --force"
        )
    require_writable(found.path, "the stub")
    emit(found.text, found.path, option="the stub")
    print(f"Found {found.name} in {found.file}, line {found.line}")
    if found.others:
        more = ", …" if len(found.others) > 8 else ""
        print(f"Other classes, for --class: {', '.join(found.others[:8])}{more}")
    print(f"Wrote {found.path}")
    for line, what in found.todo:
        print(f"TODO  line {line}: {what}")
    print(f"Next: normscope check {found.model}")
