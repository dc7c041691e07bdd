"""`normscope init [PATH]`: write a factory for the model in the user's code."""

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.output import emit, require_writable
from normscope.errors import UsageError


def command(
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="Python file, or a folder of them. Default: this folder.")
    ] = Path(),
    class_: Annotated[
        str | None,
        typer.Option(
            "--class", metavar="NAME", help="Class of the model, such as MyModel. Default: the likeliest."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing normscope_model.py.")] = False,
) -> None:
    """Find the model in your code and write normscope_model.py, a factory that `normscope check` takes.

    Your files are read, but not imported or run. The stub has a TODO for each value that the code does not
    show.
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
    print(f"Next: normscope check {found.path}:build")
