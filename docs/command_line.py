"""The command line as Markdown, drawn from the application itself: what `docs/reference/cli.md` shows.

python docs/command_line.py
"""

import enum
import re
from collections.abc import Iterator
from typing import Any

import typer

from normscope.cli.main import app


def command_line() -> str:
    """A section for each command: usage, what it does, its arguments and options."""
    return "\n".join("\n".join(_section(name, each)) for name, each in commands().items())


def commands() -> dict[str, Any]:
    """The commands by name, in the order of `normscope --help`."""
    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    words = ["normscope", name, *(_metavar(each) for each in arguments), *(["[OPTIONS]"] if options else [])]
    yield f"## normscope {name}\n\n```text\n{' '.join(words)}\n```\n\n{_prose(command.help)}\n"
    if arguments:
        yield from ["| argument | meaning |", "|---|---|"]
        yield from (f"| `{_metavar(each)}` | {_cell(each.help)} |" for each in arguments)
        yield ""
    if options:
        yield from ["| option | default | meaning |", "|---|---|---|"]
        yield from (f"| {_names(each)} | {_default(each)} | {_cell(each.help)} |" for each in options)
        yield ""


def _metavar(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _names(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    return " ".join(f"`{name}`" for name in names) + (f" `{option.metavar}`" if option.metavar else "")


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value == "" or not option.show_default:
        return ""
    return (
        f"`{option.opts[0]}`"
        if value is True
        else f"`{value.value if isinstance(value, enum.Enum) else value}`"
    )


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in _plain(text).splitlines())


def _cell(text: str) -> str:
    return " ".join(_plain(text).split()).replace("|", "\\|")


def _plain(text: str) -> str:
    """Typer's markup as Markdown: bold is a literal to type."""
    return re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text).replace("<", "&lt;")


if __name__ == "__main__":
    print(command_line())
