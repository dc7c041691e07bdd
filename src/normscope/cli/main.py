"""The application: its commands, and how errors leave it (one line, exit 2; never a traceback)."""

import sys
import traceback
from collections.abc import Sequence

import typer

from normscope.cli import anatomy, bench, check, claims, demo, explain, map, schemes, train
from normscope.cli.defaults import read_defaults
from normscope.errors import UsageError, describe
from normscope.interrupts import only_once

app = typer.Typer(
    name="normscope",
    help="Will this deep Transformer train? Reads where the norms sit on the residual stream, "
    "measures what that does, and says so before you pay for the run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="check")(check.command)
app.command(name="anatomy")(anatomy.command)
app.command(name="explain")(explain.command)
app.command(name="schemes")(schemes.command)
app.command(name="train")(train.command)
app.command(name="map")(map.command)
app.command(name="claims")(claims.command)
app.command(name="demo")(demo.command)
app.command(name="bench")(bench.command)


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
    context.default_map = read_defaults()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 clean, 1 findings at or above --fail-on, 2 unusable, 130 on Ctrl-C."""
    with only_once():  # to the end of the process: a second Ctrl-C would cost the report of the first
        sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """The command line without the exit: its status (see `main`)."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="normscope", standalone_mode=False)
    except typer.TyperException as error:
        message = _one_line(error)
        return _refuse(message) if message else 2  # empty: the help was shown
    except UsageError as error:
        return _refuse(str(error), show_traceback="--traceback" in arguments)
    except (KeyboardInterrupt, typer.Abort):
        print("normscope: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `normscope check … | head`: the reader has left, there is nothing to say
        sys.stderr.close()
        return 1
    except Exception as error:  # whatever a model can throw: still one line, and the way to see more
        line = UsageError(
            describe(error), "a model that can be read and run", "--traceback shows where it broke"
        )
        return _refuse(str(line), show_traceback="--traceback" in arguments)
    return code if isinstance(code, int) else 0


def _one_line(error: typer.TyperException) -> str:
    """What Typer found wrong with the call, and where to read on; empty where it showed the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "normscope"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    words = " ".join(message.split())
    return f"{words}{'' if words.endswith(('.', '?')) else '.'} See `{command} --help`." if words else ""


def _refuse(message: str, *, show_traceback: bool = False) -> int:
    if show_traceback:
        traceback.print_exc()
    print(f"normscope: {message}", file=sys.stderr)
    return 2
