"""`normscope check MODEL`: anatomy, probes, forecast and verdict."""

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from normscope.cli import options
from normscope.cli.options import FailOn, option
from normscope.cli.output import chosen_format, emit, require_writable
from normscope.cli.progress import progress_bar, quiet_libraries
from normscope.completion import complete_codes, complete_formats
from normscope.database import is_store
from normscope.errors import UsageError
from normscope.interrupts import postponed

if TYPE_CHECKING:
    from normscope.report import Report
    from normscope.subjects import Run


class Format(StrEnum):
    """Output formats of the report."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"


Select = Annotated[
    str,
    option(
        "Report only these findings, by code, prefix or name: NS101,NS5,post-ln-deep.",
        metavar="CODES",
        autocompletion=complete_codes,
    ),
]
Ignore = Annotated[
    str,
    option(
        "Leave out these findings, by code, prefix or name: NS301,NS5.",
        metavar="CODES",
        autocompletion=complete_codes,
    ),
]
OF_CHECK = ("steps", "refine", "try_remedies", "budget", "quantise", "seed", "select", "ignore")
"""Options that go to `normscope.check`; those of `options.OF_LOAD` go to `load`."""
OF_RECIPE = (
    *("optimizer", "lr", "warmup", "schedule", "run_steps", "weight_decay"),
    *("eps", "beta1", "beta2", "clip", "accumulation", "precision"),
)
"""Options that say what a step of the intended run is; a Run has its own."""
_TYPED = ("COMMANDLINE", "ENVIRONMENT")
RECIPE = "Recipe of the intended run"

OF_SHOWING = ("format", "output", "fail_on", "traceback", "quiet_script")
"""Options that change nothing in the report."""
OF_SCRIPT = {
    "model",
    "steps",
    "refine",
    "forecast",
    "rates",
    "try_remedies",
    "budget",
    "select",
    "ignore",
    "module",
}
OF_SCRIPT |= {"quantise", *OF_SHOWING}
"""Parameters that the check of a script takes; the script sets the others."""


OF_STORE = {"model", "select", "ignore", "format", "output", "fail_on", "traceback"}
"""Parameters that the check of a run's store takes; it measures nothing anew."""


SCRIPT = "normscope.script"
"""Key of the context's `meta` for the words of a training script; None without `--`."""


def _of_recipe(help: str, **more: Any) -> Any:
    return option(help, rich_help_panel=RECIPE, **more)


def command(
    context: typer.Context,
    model: options.Model,
    optimizer: Annotated[
        str,
        typer.Option(help="Optimiser: adamw, adam, sgd (momentum 0.9) or muon.", rich_help_panel=RECIPE),
    ] = "adamw",
    lr: Annotated[
        float,
        typer.Option(
            help="Learning rate. A factory's Run has its own; this one then scales all its groups.",
            rich_help_panel=RECIPE,
        ),
    ] = 3e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.", rich_help_panel=RECIPE)] = 0,
    schedule: Annotated[
        str | None,
        _of_recipe(
            "Learning rate after the warm-up: constant, cosine, or wsd (constant, then a linear decay). "
            "Default: constant."
        ),
    ] = None,
    run_steps: Annotated[
        int | None,
        _of_recipe("Steps of the whole run, over which --schedule decays. Default: many more than --steps."),
    ] = None,
    weight_decay: Annotated[float | None, _of_recipe("Weight decay. Default: the optimiser's own.")] = None,
    eps: Annotated[float | None, _of_recipe("Adam's ε. Default: the optimiser's own.")] = None,
    beta1: Annotated[float | None, _of_recipe("Adam's decay rate of the mean. Default: 0.9.")] = None,
    beta2: Annotated[float | None, _of_recipe("Adam's decay rate of the squares. Default: 0.999.")] = None,
    clip: Annotated[
        float | None, _of_recipe("Clip the norm of all gradients together to this. Default: no clipping.")
    ] = None,
    accumulation: Annotated[
        int | None, _of_recipe("Batches per step; their gradients are averaged. Default: 1.")
    ] = None,
    precision: Annotated[
        str | None,
        _of_recipe(
            "float32, or autocast to bfloat16 or float16 (with loss scaling). Default: float32, which keeps "
            "the model's own type."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps to try on a copy of the model; 0 skips the forecast.")
    ] = 20,
    forecast: Annotated[
        bool,
        typer.Option("--forecast", help="Also try other learning rates, and whether warm-up helps."),
    ] = False,
    rates: Annotated[
        str | None,
        option(
            "Learning rates to try; implies --forecast. 1e-4,3e-4, or FIRST:LAST:COUNT on a log scale: "
            "1e-5:3e-2:8. Default: nine around --lr.",
            metavar="RATES",
        ),
    ] = None,
    refine: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --forecast: steps over which the four best learning rates are tried again; those in "
            "doubt around the largest that trains are tried over 300. Default: 140. 0 leaves both out: "
            "less than half of the time, and less certain rates. A script takes 300 steps, with 0 --steps.",
            metavar="STEPS",
            show_default=False,
        ),
    ] = None,
    try_remedies: Annotated[
        bool,
        typer.Option("--try-remedies", help="If the forecast fails, try the remedies and rank them."),
    ] = False,
    budget: Annotated[
        options.Budget,
        typer.Option(
            help="Jacobian analysis: fast (160 forwards), standard (a few training steps), deep (minutes)."
        ),
    ] = options.Budget.STANDARD,
    quantise: Annotated[
        str,
        option(
            "Also round weights, stream, norms and branches, place by place, to int8, int4, fp8 or several "
            "(int8,fp8). Needs the extra quantise (torchao).",
            metavar="FORMATS",
            autocompletion=complete_formats,
        ),
    ] = "",
    batch_size: options.BatchSize = 4,
    seq_len: options.SeqLen = 64,
    text: options.Text = None,
    source: options.Source = None,
    target: options.Target = None,
    images: options.Images = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.DType = None,
    format: Annotated[
        Format, typer.Option(help="Format of the report; markdown has at most 60 lines.")
    ] = Format.TEXT,
    output: options.Output = None,
    fail_on: Annotated[FailOn, typer.Option(help="Minimum severity for exit status 1.")] = FailOn.ERROR,
    select: Select = "",
    ignore: Ignore = "",
    module: Annotated[
        str | None,
        option("With a script: class of the module to check, where several train.", metavar="CLASS"),
    ] = None,
    quiet_script: Annotated[
        bool, typer.Option("--quiet-script", help="With a script: hide its own output.")
    ] = False,
    traceback: options.Traceback = False,
) -> int:
    """Predict whether MODEL will train: read its norms, measure, try a few steps on a copy, report findings.

    Example: normscope check nn:decoder,scheme=post,depth=24 --optimizer adam --lr 1e-3

    With `--` and a command instead of MODEL, check a training script as it is: run it for --steps optimizer
    steps, with its own data, optimizer and schedule, then end it. It runs as it would without normscope, so
    what it writes in these steps is written.

    Example: normscope check --steps 20 -- python train.py --its --own=options

    With the store of a run, RUN.db, instead of MODEL, report on that run: its alarms, its first wrong
    value and its figures, while it goes on, after its end, or after it died. A SQLite file is taken for a
    store by its content. Of the options, --format, --output, --fail-on, --select and --ignore apply.

    Example: normscope check run.db --fail-on warning

    A script with fewer steps is not judged healthy: the report shows what was seen, with exit status 1 or 2.
    Python must load normscope's hook: python -I, -E and -S cannot.

    Exit status: 0 no finding at or above --fail-on; 1 such a finding; 2 the call, the model or the script
    cannot be used; 130 Ctrl-C, after the measurements so far were shown. The verdict "no trial" (the model
    has no loss, or --steps 0) counts as a warning. Of a run, the verdict "failed" counts as an error and
    "undecided" as a warning.

    A second Ctrl-C prints a line and the report still follows. One more, at least a second later, ends the
    command at once, without the report.

    The table \\[tool.normscope] of pyproject.toml can set defaults of these options. With a script, those
    that the script sets itself are not used.
    """
    require_writable(output)
    format = chosen_format(context, Format)
    if context.meta[SCRIPT] is None and is_store(model):
        return _of_store(context, format)
    if steps == 0 and (forecast or refine or rates is not None or try_remedies):
        flag = "--try-remedies" if try_remedies else "--forecast"
        raise UsageError(f"{flag} with --steps 0", "real steps to try", "leave --steps out")
    if context.meta[SCRIPT] is not None:
        return _of_script(context, format)
    if context.args:
        given = f'"{" ".join(context.args)}" after MODEL "{model}"'
        raise UsageError(given, "one MODEL", "write -- before the command of a training script")

    import normscope
    from normscope.probes.quantisation import formats_to_round
    from normscope.subjects import load

    formats_to_round(quantise)  # refused before the model is loaded
    rungs = None if rates is None else _rates(rates)
    interrupted = False
    with redirect_stdout(sys.stderr), quiet_libraries(), progress_bar() as progress:
        subject = load(model, **options.loading(context))
        settings = {name: context.params[name] for name in OF_CHECK} | recipe_options(context, subject.run)
        if rungs is None:
            rungs = _around(subject.run, settings) if forecast or refine else []
        try:
            report = normscope.check(
                subject, **settings, forecast_rates=rungs, progress=progress, reraise=traceback
            )
        except normscope.CheckInterrupted as stop:
            report, interrupted = stop.report, True
            print("normscope: interrupted; the report has the measurements so far", file=sys.stderr)
    show(report, format, output, command_of(context))
    return 130 if interrupted else exit_status(report, fail_on)


def _of_script(context: typer.Context, format: Format) -> int:
    """The check of a training script; see `command`."""
    from normscope.cli.script import check_script
    from normscope.pipeline import require_longer
    from normscope.probes.quantisation import formats_to_round

    given, words = context.params, context.meta[SCRIPT]
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name in _TYPED and parameter.name not in OF_SCRIPT:
            option = f"{parameter.opts[0]} with a training script"
            raise UsageError(option, "the script's own setting", f"set it in `{shlex.join(words)}`")
    if given["model"] != words[0] or context.args != words[1:]:
        both = f'MODEL "{given["model"]}" and `{shlex.join(words)}` after --'
        raise UsageError(both, "one of the two", "leave one out")
    if given["steps"] == 0:
        raise UsageError("--steps 0 with a training script", "1 or more", "leave --steps out")
    rates = [] if given["rates"] is None else _rates(given["rates"])
    forecast = given["forecast"] or bool(given["refine"])
    require_longer(given["refine"], given["steps"], tries_rates=forecast or bool(rates))
    formats_to_round(given["quantise"])  # refused before the script starts
    names = (
        "steps",
        "refine",
        "try_remedies",
        "budget",
        "quantise",
        "select",
        "ignore",
        "module",
        "traceback",
    )
    settings = {name: given[name] for name in names} | {"forecast": forecast, "rates": tuple(rates)}
    outcome = check_script(words, settings, quiet=given["quiet_script"])
    if outcome.report is not None:
        show(outcome.report, format, given["output"], command_of(context))
        if not outcome.is_interrupted and (outcome.is_whole or exit_status(outcome.report, given["fail_on"])):
            return exit_status(outcome.report, given["fail_on"])
    return 130 if outcome.is_interrupted else 2


def _of_store(context: typer.Context, format: Format) -> int:
    """The check of a run from its store; see `command`."""
    from normscope.cli.run_view import print_run, text_run
    from normscope.monitor.after import check_run

    given = context.params
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name in _TYPED and parameter.name not in OF_STORE:
            option = f"{parameter.opts[0]} with the store of a run"
            raise UsageError(option, "a run that was measured while it went on", "leave it out")
    if context.args:
        extra = f'"{" ".join(context.args)}" after the store "{given["model"]}"'
        raise UsageError(extra, "one store", "check each one by itself")
    report = check_run(given["model"], select=given["select"], ignore=given["ignore"])
    parts = (lambda: print_run(report), lambda: text_run(report))
    shown = Shown(str(report.scene.path), report.verdict, *parts, report)
    write(shown, format, given["output"], command_of(context))
    return _status(report.severities, given["fail_on"])


def recipe_options(context: typer.Context, run: "Run | None") -> dict[str, Any]:
    """The options of `OF_RECIPE` by name; beside a Run, only those that stand on the command line."""
    given = {name: context.params[name] for name in OF_RECIPE}
    if run is None:
        return given
    sources = {name: context.get_parameter_source(name) for name in given}
    typed = {name for name, source in sources.items() if source and source.name in _TYPED}
    return {name: value for name, value in given.items() if name in typed}


MOST_RATES = 100
"""Most learning rates of a range: each takes up to 36 training steps."""


def _rates(given: str) -> list[float]:
    """The learning rates that `--rates` names."""
    from normscope.maps.grid import rates

    return rates(given, "--rates", MOST_RATES)


def _around(run: "Run | None", settings: dict[str, Any]) -> list[float]:
    """The learning rates around that of the intended run."""
    from normscope.forecast import rates_around
    from normscope.train import Recipe

    of_recipe = {name: value for name, value in settings.items() if name in OF_RECIPE}
    return rates_around(Recipe.asked_for(run, steps=0, seed=0, **of_recipe).lr)


def words_of_script(command: str | None, arguments: Sequence[str]) -> list[str] | None:
    """The words behind `--`, the command of a training script; None without `--`.

    Raises:
        UsageError: there are none, or the command takes none.
    """
    if "--" not in arguments:
        return None
    words = list(arguments[list(arguments).index("--") + 1 :])
    if command not in ("check", "watch"):
        _refuse_script(command, words)
        return None
    if command == "check" and len(words) == 1 and ":" in words[0]:
        return None  # a MODEL, kept apart from the options
    if not words:
        given = f"{command} -- without a command"
        raise UsageError(given, "the command of a training script", f"write {command} -- python train.py")
    return words


_INSTEAD_OF_SCRIPT = {
    "plan": "or call normscope.plan in the script",
    "anatomy": "or call normscope.read_anatomy in the script",
    "train": "or run `normscope check -- …` to judge the script",
    "map": "or run `normscope check -- …` to judge the script",
    "diff": "or give a file that holds the command, such as `-- python train.py`",
}
"""Commands that take a MODEL and no script: what else there is to do."""


def _refuse_script(command: str | None, words: Sequence[str]) -> None:
    file = next((word for word in words if word.endswith(".py")), None)
    if command not in _INSTEAD_OF_SCRIPT or file is None:
        return
    raise UsageError(
        f"{command} -- {shlex.join(words)}",
        "a MODEL, because only check and watch take the command of a script",
        f"write a factory (`normscope init {shlex.quote(file)}` does) and give FILE.py:FACTORY, "
        f"{_INSTEAD_OF_SCRIPT[command]}",
    )


class Rendered(Protocol):
    """A report in the formats of files."""

    def to_json(self) -> str: ...
    def to_html(self, path: Path | None = None, *, command: str | None = None) -> str: ...
    def to_markdown(self, command: str | None = None) -> str: ...


@dataclass(frozen=True)
class Shown:
    """A report that is shown.

    Attributes:
        name, verdict: of the line on stderr that says where the report is.
        print: prints the report on the terminal.
        text: the report as plain text.
        report: the report.
    """

    name: str
    verdict: str
    print: Callable[[], None]
    text: Callable[[], str]
    report: Rendered


def show(report: "Report", format: Format, output: Path | None, command: str | None = None) -> None:
    """Write the report in `format` to stdout or a file; `command` is the call that made it."""
    from normscope.report import print_report, text_report
    from normscope.report.words import headline

    parts = (lambda: print_report(report), lambda: text_report(report))
    said = headline(report.verdict, report.forecast, report.ladder)
    write(Shown(report.model, said, *parts, report), format, output, command)


def write(shown: Shown, format: Format, output: Path | None, command: str | None) -> None:
    """Write a report in `format` to stdout or a file; `command` is the call that made it.

    Ctrl-C meanwhile does not lose it: everything in it was measured.
    """
    with postponed(lambda: None):
        _write(shown, format, output, command)


def _write(shown: Shown, format: Format, output: Path | None, command: str | None) -> None:
    report = shown.report
    if format is Format.HTML and output is None and sys.stdout.isatty():
        output = Path("normscope.html")  # a terminal cannot show a page
    if format is Format.HTML:
        emit(report.to_html(command=command), output, instead=shown.text)
    elif format is Format.JSON:
        emit(report.to_json() + "\n", output)
    elif format is Format.MARKDOWN:
        emit(report.to_markdown(command), output)
    elif output is None:
        shown.print()
    else:
        emit(shown.text(), output)
    if output is not None:
        print(f"{shown.name}: {shown.verdict}. The report is in {output}", file=sys.stderr)


def command_of(context: typer.Context) -> str:
    """The command that repeats the measurements; it includes options set by pyproject.toml."""
    words, script = ["normscope", "check"], context.meta.get(SCRIPT)
    left_out = {*OF_SHOWING}
    if script:
        left_out |= {str(each.name) for each in context.command.params} - OF_SCRIPT
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name == "model":
            words += [] if script else [str(value)]
        elif name not in left_out and value is not None and value != parameter.default:
            number = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
            words += [parameter.opts[0]] if value is True else [parameter.opts[0], number]
    return shlex.join(words + (["--", *script] if script else []))


def exit_status(report: "Report", fail_on: FailOn) -> int:
    """1 if a finding is at least as severe as `fail_on`, else 0; "no trial" counts as a warning."""
    severities = {str(finding.severity) for finding in report.findings}
    if report.verdict == "no trial":
        severities.add("warning")
    return _status(severities, fail_on)


def _status(severities: set[str], fail_on: FailOn) -> int:
    failing = {FailOn.ERROR: ("error",), FailOn.WARNING: ("error", "warning"), FailOn.NEVER: ()}[fail_on]
    return int(not severities.isdisjoint(failing))
