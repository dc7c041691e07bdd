"""`normscope check MODEL`: the whole way, to a verdict."""

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.options import (
    BatchSize,
    Budget,
    Device,
    DType,
    FailOn,
    Format,
    Images,
    Model,
    Output,
    Seed,
    SeqLen,
    Source,
    Target,
    Text,
    Traceback,
    parse_dtype,
)
from normscope.cli.output import emit, require_writable
from normscope.cli.progress import progress_bar, quiet_libraries

if TYPE_CHECKING:
    from normscope.report import Report

Codes = Annotated[
    str,
    typer.Option(
        metavar="CODES",
        help="Findings by code, prefix or name, with commas: NS101,NS5,post-ln-deep.",
        show_default=False,
    ),
]


def command(
    model: Model,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd (momentum 0.9) or muon: what the run will use.")
    ] = "adamw",
    lr: Annotated[float, typer.Option(help="The learning rate of the intended run.")] = 3e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Its linear warm-up, in steps.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Real steps to try on a copy; 0: no forecast.")] = 20,
    forecast: Annotated[
        bool,
        typer.Option("--forecast", help="Try other learning rates too, and whether warm-up helps."),
    ] = False,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Its rungs: 1e-5:3e-2:8 (first:last:count) or 1e-4,3e-4; by default nine around --lr.",
            show_default=False,
        ),
    ] = None,
    try_remedies: Annotated[
        bool,
        typer.Option("--try-remedies", help="Where the run will fail, try the remedies and rank them."),
    ] = False,
    budget: Annotated[
        Budget, typer.Option(help="What Jacobians may cost: seconds, a few training steps, minutes.")
    ] = Budget.STANDARD,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 64,
    text: Text = None,
    source: Source = None,
    target: Target = None,
    images: Images = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: DType = None,
    format: Annotated[Format, typer.Option(help="How to show the report.")] = Format.TEXT,
    output: Output = None,
    fail_on: Annotated[FailOn, typer.Option(help="Exit 1 from this severity on.")] = FailOn.ERROR,
    select: Codes = "",
    ignore: Codes = "",
    traceback: Traceback = False,
) -> int:
    """Will MODEL train? Reads it, measures it, takes a few real steps on a copy, and judges.

    Exit status: 0 clean, 1 findings at or above --fail-on, 2 the call or the model cannot be used, 130 Ctrl-C
    (what was measured until then is shown). The verdict "no trial" (no loss, or --steps 0: nothing was tried
    that could fail) counts as a warning: status 1 with --fail-on warning, else 0.

    Defaults of these options may stand in the table \\[tool.normscope] of pyproject.toml.
    """
    import normscope
    from normscope.subjects import load

    require_writable(output)
    _require_steps(steps, forecast or rates is not None, try_remedies)
    rungs = _rungs(forecast, rates, lr)
    interrupted = False
    with redirect_stdout(sys.stderr), quiet_libraries(), progress_bar() as progress:
        subject = load(
            model,
            seed=seed,
            batch_size=batch_size,
            seq_len=seq_len,
            text=text,
            source=source,
            target=target,
            images=images,
            device=device,
            dtype=parse_dtype(dtype),
        )
        try:
            report = normscope.check(
                subject,
                optimizer=optimizer,
                lr=lr,
                warmup=warmup,
                steps=steps,
                forecast_rates=rungs,
                try_remedies=try_remedies,
                budget=budget,
                seed=seed,
                select=select,
                ignore=ignore,
                progress=progress,
                reraise=traceback,
            )
        except normscope.CheckInterrupted as stop:
            report, interrupted = stop.report, True
            print("normscope: interrupted; this is what was measured until then", file=sys.stderr)
    show(report, format, output)
    return 130 if interrupted else exit_status(report, fail_on)


def _require_steps(steps: int, ladder: bool, remedies: bool) -> None:
    """UsageError in the words of the command line; `check` has its own."""
    from normscope.errors import UsageError

    if steps == 0 and (ladder or remedies):
        flag = "--try-remedies" if remedies else "--forecast"
        raise UsageError(f"{flag} with --steps 0", "real steps to try", "leave --steps out")


def _rungs(wanted: bool, given: str | None, lr: float) -> list[float]:
    """The ladder's rates: those that were given, else some around `lr`; none where not wanted."""
    if given is not None:
        from normscope.maps.grid import rates

        return rates(given, "--rates")
    return ladder_around(lr) if wanted else []


def ladder_around(lr: float) -> list[float]:
    """`lr` and four rates on each side, 10^⅓ apart, as far as they lie between 1e-5 and 3e-2 or `lr`."""
    around = [float(f"{lr * 10 ** (step / 3):.3g}") for step in range(-4, 5) if step]
    low, high = min(1e-5, lr), max(3e-2, lr)
    return sorted([lr, *(rate for rate in around if low <= rate <= high)])


def show(report: "Report", format: Format, output: Output) -> None:
    """The report in `format`, on stdout or in a file."""
    from normscope.report import print_report, text_report

    if format is Format.HTML and output is None and sys.stdout.isatty():
        from pathlib import Path

        output = Path("normscope.html")  # a page in a terminal helps nobody
    if output is None and format is Format.TEXT:
        print_report(report)
        return
    rendered = {
        Format.TEXT: lambda: text_report(report),
        Format.JSON: lambda: report.to_json() + "\n",
        Format.HTML: report.to_html,
    }[format]()
    emit(rendered, output, instead=(lambda: text_report(report)) if format is Format.HTML else None)
    if output is not None:
        print(f"{report.model}: {report.verdict}. The report is in {output}", file=sys.stderr)


def exit_status(report: "Report", fail_on: FailOn) -> int:
    """1 where a finding is as severe as `fail_on` asks, else 0; "no trial" counts as a warning."""
    failing = {FailOn.ERROR: ("error",), FailOn.WARNING: ("error", "warning"), FailOn.NEVER: ()}[fail_on]
    severities = {str(finding.severity) for finding in report.findings}
    if report.verdict == "no trial":
        severities.add("warning")
    return int(not severities.isdisjoint(failing))
