"""`normscope diff A B`: whether two models are the same, and where they part."""

import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli import options
from normscope.cli.options import option, words_of
from normscope.cli.output import chosen_format, require_writable
from normscope.cli.progress import progress_bar, quiet_libraries
from normscope.cli.report_output import Format, Shown, write
from normscope.completion import complete_side
from normscope.errors import UsageError

if TYPE_CHECKING:
    from normscope.compare import Diff, Part

OF_SHOWING = ("format", "output", "fail_on", "traceback")
"""Options that change nothing in the comparison."""
NEVER = "never"

SIDE_HELP = (
    "A MODEL as for [bold]check[/bold]; [bold]git:REV:path/to/file.py:factory[/bold]: the same of a revision "
    "of this repository; [bold]report.json[/bold] of a check or [bold]run.db[/bold] of a run; or a file with "
    "the command of a training script, [bold]-- python train.py …[/bold]."
)


def _side(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete_side)


def command(
    context: typer.Context,
    a: Annotated[str, _side("A", SIDE_HELP)],
    b: Annotated[str, _side("B", "The other one, in the same forms.")],
    parts: Annotated[
        str | None,
        option(
            "Parts to compare: structure,start,recipe,function,verdict. Default: all that the two allow.",
            metavar="PARTS",
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        option(
            "Parts whose differences give exit status 1, or never. Default: all parts that were compared.",
            metavar="PARTS",
        ),
    ] = None,
    map: Annotated[
        Path | None,
        option(
            "JSON or TOML file, name of a weight of B = name of its weight of A, for weights that cannot be "
            "mapped otherwise.",
            metavar="FILE",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check both models too, and compare findings and verdicts.")
    ] = False,
    rtol: Annotated[
        float | None,
        option(
            "Largest relative difference that counts as the same function. Default: a few times the "
            "rounding, which is measured."
        ),
    ] = None,
    batch_size: options.BatchSize = 4,
    seq_len: options.SeqLen = 64,
    text: options.Text = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.DType = None,
    format: Annotated[Format, typer.Option(help="Format of the comparison.")] = Format.TEXT,
    output: options.Output = None,
    traceback: options.Traceback = False,
) -> int:
    """Compare two models: structure, start, recipe and function; name where they part, and the reason.

    Example: normscope diff hf:gpt2,n_layer=4 nn:decoder,depth=4

    Example: normscope diff git:main:model.py:build model.py:build --fail-on structure,function

    The weights of A are put into B as far as they can be mapped, both get the same batch in float64, and the
    first place where the two differ is named, with the likely reason, which is tried. Nothing is written.

    Exit status: 0 no difference in the parts of --fail-on; 1 a difference; 2 the call or a model cannot be
    used; 130 Ctrl-C, after what was compared so far was shown.

    The table \\[tool.normscope] of pyproject.toml can set defaults of --seed, --batch-size, --seq-len,
    --text, --device and --dtype.
    """
    require_writable(output)
    format = chosen_format(context, Format)
    import normscope
    from normscope.compare.compare import parts_of

    failing = None if fail_on is None else () if fail_on == NEVER else parts_of(fail_on, "--fail-on")
    wanted = None if parts is None else parts_of(parts, "--parts")
    if wanted is not None and (missing := set(failing or ()).difference(wanted)):
        given = f"--fail-on {fail_on} with --parts {parts}"
        raise UsageError(given, "parts that are compared", f"add {min(missing)} to --parts, or leave it out")
    check = check or "verdict" in (failing or ())
    loading = options.loading(context)
    del loading["dtype"]
    interrupted = False
    with redirect_stdout(sys.stderr), quiet_libraries(), progress_bar() as progress:
        try:
            found = normscope.diff(
                a,
                b,
                parts=wanted,
                map=map,
                check=check,
                rtol=rtol,
                dtype=dtype,
                progress=progress,
                reraise=traceback,
                **loading,
            )
        except normscope.DiffInterrupted as stop:
            found, interrupted = stop.diff, True
            print("normscope: interrupted; what was compared so far is shown", file=sys.stderr)
    _write(found, format, output, command_of(context))
    return 130 if interrupted else exit_status(found, failing)


def exit_status(diff: "Diff", failing: "tuple[Part, ...] | None") -> int:
    """1 if a part of `failing` has a difference, else 0; None is all parts.

    2 where that is not known: a part of `failing`, or every part, was not compared. A line on stderr says so.
    """
    if any(failing is None or each.part in failing for each in diff.differences):
        return 1
    missing = {each.part: each for each in diff.parts if each.how == "not"}
    if failing is None and len(missing) == len(diff.parts):
        print("normscope: no part was compared; the reasons stand above", file=sys.stderr)
        return 2
    for part in failing or ():
        if part in missing:
            why = "; ".join(missing[part].why)
            print(f"normscope: --fail-on {part}, which was not compared: {why}", file=sys.stderr)
            return 2
    return 0


def command_of(context: typer.Context) -> str:
    """The command that repeats the comparison; it includes options set by pyproject.toml."""
    words = ["normscope", "diff", context.params["a"], context.params["b"]]
    return shlex.join(words + words_of(context, {"a", "b", *OF_SHOWING}))


def _write(diff: "Diff", format: Format, output: Path | None, command: str) -> None:
    """Write the comparison in `format` to stdout or a file; `command` is the call that made it."""
    from normscope.compare.text import print_diff
    from normscope.compare.words import clean, lead

    shown = Shown(
        diff,
        lambda: print_diff(diff),
        diff.to_text,
        verdict=lead(clean(diff)),
        noun="comparison",
        page="normscope-diff.html",
    )
    write(shown, format, output, command)
