"""The application: its commands and its error handling (one line, exit status 2, no traceback)."""

import contextlib
import sys
import traceback
from collections.abc import Sequence
from enum import EnumType
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from normscope.cli import (
    anatomy,
    bench,
    check,
    claims,
    demo,
    diff,
    doctor,
    explain,
    init,
    map,
    plan,
    schema,
    schemes,
    train,
    watch,
)
from normscope.cli.completing import as_bash_wants
from normscope.cli.defaults import read_defaults
from normscope.cli.output import is_of_output, spell_out, unwritten
from normscope.cli.script_words import SCRIPT, words_of_script
from normscope.errors import CaptureError, UsageError, describe, nearest
from normscope.interrupts import only_once


class _InterruptedError(Exception):
    """Ctrl-C in a command that does not handle it."""


class _Commands(TyperGroup):
    """The commands; Ctrl-C goes past Typer, which would end the process without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _InterruptedError from stop


app = typer.Typer(
    name="normscope",
    cls=_Commands,
    help="Predict whether a deep Transformer will train: read where the norms sit on the residual stream, "
    "measure what that does to signals and gradients, and report findings before you pay for the run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (
    check,
    anatomy,
    diff,
    explain,
    schemes,
    train,
    watch,
    map,
    plan,
    claims,
    demo,
    bench,
    schema,
    doctor,
    init,
):
    _more = {"allow_extra_args": True} if _module in (check, watch) else {}  # the words of a script
    app.command(name=_module.__name__.rpartition(".")[2], context_settings=_more)(_module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from normscope import __version__

        print(f"normscope {__version__}")
        raise typer.Exit


@app.callback()
def _start(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    context.meta[SCRIPT] = words_of_script(context.invoked_subcommand, context.obj)
    takes_defaults = context.invoked_subcommand in ("check", "anatomy", "diff")
    asks_for_help = set(context.obj) & set(context.help_option_names)
    if takes_defaults and not asks_for_help:
        context.obj = read_defaults()
        context.default_map = context.obj.map


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    0 clean, 1 findings at or above --fail-on, 2 unusable or the output cannot be written, 130 on Ctrl-C.
    """
    with only_once(ends_process=True):  # a second Ctrl-C would lose the report
        sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line without exiting; return its status (see `main`)."""
    spell_out()
    try:
        command = typer.main.get_command(app)
        with as_bash_wants():
            code = command.main(arguments, prog_name="normscope", standalone_mode=False, obj=arguments)
        sys.stdout.flush()  # Python's own flush, at exit, could only fail with a traceback
    except typer.TyperException as error:
        message = _one_line(error)
        return _refuse(message) if message else 2  # empty: the help was shown
    except UsageError as error:
        return _refuse(str(error), show_traceback="--traceback" in arguments)
    except (KeyboardInterrupt, _InterruptedError, typer.Abort):
        print("normscope: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # Typer exits with 1 where a pipe is closed, as if there were a finding
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        return _refuse(unwritten(stop.__context__))
    except Exception as error:  # a model can raise anything: still one line, and how to see more
        if is_of_output(error):
            return _refuse(unwritten(error))
        return _refuse(_unexpected(error, arguments), show_traceback="--traceback" in arguments)
    return code if isinstance(code, int) else 0


def _one_line(error: typer.TyperException) -> str:
    """One line for an error of Typer, with the help to read; empty if Typer showed the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "normscope"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if hasattr(error, "possibilities") and context is not None:
        message = _unknown_option(str(getattr(error, "option_name", "")), context)
    words = " ".join(message.replace("Value error, ", "").split())
    words += "" if words.endswith((".", "?")) or not words else "."
    if (line := _in_file(error, context)) is not None:
        return f"{line}: {words.rpartition(': ')[2]} Fix that line."
    return f"{words} See `{command} --help`." if words else ""


def _unknown_option(name: str, context: Any) -> str:
    """The message for an option that the command does not have, with the nearest that it has."""
    options = {option.strip("-"): option for param in context.command.params for option in param.opts}
    for param in context.command.params:  # --html for --format html
        if param.opts[0].startswith("--") and name.strip("-") in _choices(param):
            return f"No such option: {name}; did you mean {param.opts[0]} {name.strip('-')}?"
    best = nearest(name.strip("-"), [word for word, option in options.items() if option.startswith("--")])
    return f"No such option: {name}" + (f"; did you mean {options[best]}?" if best is not None else "")


def _choices(param: Any) -> list[str]:
    """The words that an option takes, where these are a fixed few."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    members: list[Any] = list(kind) if isinstance(kind, EnumType) else []
    return [str(each.value) for each in members]


def _in_file(error: typer.TyperException, context: Any) -> str | None:
    """File and line of the value that Typer refused, if it came from a pyproject.toml."""
    name = getattr(getattr(error, "param", None), "name", None)
    source = context.get_parameter_source(name) if context is not None and name is not None else None
    return context.obj.quoted(name) if source is not None and source.name == "DEFAULT_MAP" else None


def _unexpected(error: Exception, arguments: Sequence[str]) -> str:
    """One line for an unexpected error: the model's if its forward raised it, else normscope's."""
    places = [(Path(f.f_code.co_filename), line) for f, line in traceback.walk_tb(error.__traceback__)]
    has_traceback = _takes_traceback(arguments)
    if any(file.parts[-4:] == ("torch", "nn", "modules", "module.py") for file, _ in places):
        more = (
            "add --traceback to see where it failed" if has_traceback else "change the model or its options"
        )
        return str(UsageError(describe(error), "a model that can be read and run", more))
    home = Path(__file__).resolve().parents[1]
    ours = [f"{file.name}, line {line}" for file, line in places if home in file.parents]
    place = ours[-1] if ours else "normscope"
    words = describe(error)
    if isinstance(error, CaptureError):
        words, place = str(error), error.place
    more = ", with the output of --traceback" if has_traceback else ""
    return f"{words} (in {place}): a bug in normscope. Please report it{more}."


def _takes_traceback(arguments: Sequence[str]) -> bool:
    commands = getattr(typer.main.get_command(app), "commands", {})
    command = next((commands[word] for word in arguments if word in commands), None)
    return command is not None and any(param.name == "traceback" for param in command.params)


def _refuse(message: str, *, show_traceback: bool = False) -> int:
    if show_traceback:
        traceback.print_exc()
    with contextlib.suppress(OSError):  # stderr may be full too
        print(f"normscope: {message}", file=sys.stderr)
    return 2
