"""`normscope check MODEL`: anatomy, probes, forecast and verdict."""

import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from normscope.cli import options
from normscope.cli.check_options import (
    OF_CHECK,
    command_of,
    rates_around_run,
    rates_given,
    recipe_options,
    require_usable,
    require_values,
)
from normscope.cli.options import FailOn, option
from normscope.cli.output import chosen_format, require_writable
from normscope.cli.progress import progress_bar, quiet_libraries
from normscope.cli.report_output import Format, exit_status, show
from normscope.cli.script_words import SCRIPT
from normscope.completion import complete_codes, complete_formats
from normscope.database import is_store
from normscope.errors import UsageError

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
RECIPE = "Recipe of the intended run"


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
        int,
        typer.Option(
            min=0,
            help="Training steps to try on a copy of the model, or of the script; 0 skips the forecast.",
        ),
    ] = 20,
    forecast: Annotated[
        bool,
        typer.Option(
            "--forecast",
            help="Also try other learning rates, and whether warm-up helps. A script takes 300 steps then, "
            "unless --refine 0 is given.",
        ),
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
            "less than half of the time, and less certain rates.",
            metavar="STEPS",
            show_default=False,
        ),
    ] = None,
    try_remedies: Annotated[
        bool,
        typer.Option(
            "--try-remedies",
            help="If the forecast fails, try the remedies and rank them. A script takes 300 steps then.",
        ),
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
        from normscope.cli.check_run import check_store

        return check_store(context, format)
    if steps == 0 and (forecast or refine or rates is not None or try_remedies):
        flag = "--try-remedies" if try_remedies else "--forecast"
        raise UsageError(f"{flag} with --steps 0", "real steps to try", "leave --steps out")
    require_values(context.params)
    if context.meta[SCRIPT] is not None:
        require_usable(context, context.meta[SCRIPT])
        from normscope.cli.check_script import check_script

        return check_script(context, format)
    if context.args:
        given = f'"{" ".join(context.args)}" after MODEL "{model}"'
        raise UsageError(given, "one MODEL", "write -- before the command of a training script")

    import normscope
    from normscope.probes.quantisation import formats_to_round
    from normscope.subjects import load
    from normscope.subjects.rng import seeded

    formats_to_round(quantise)  # refused before the model is loaded
    rungs = None if rates is None else rates_given(rates)
    interrupted = False
    with redirect_stdout(sys.stderr), quiet_libraries(), progress_bar() as progress:
        subject = load(model, **options.loading(context))
        settings = {name: context.params[name] for name in OF_CHECK} | recipe_options(context, subject.run)
        if rungs is None:
            rungs = rates_around_run(subject.run, settings) if forecast or refine else []
        try:
            # PyTorch starts its generator anew in each process, and a factory may draw its batches from it.
            with seeded(subject.seed):
                report = normscope.check(
                    subject, **settings, forecast_rates=rungs, progress=progress, reraise=traceback
                )
        except normscope.CheckInterrupted as stop:
            report, interrupted = stop.report, True
            print("normscope: interrupted; the report has the measurements so far", file=sys.stderr)
    show(report, format, output, command_of(context))
    return 130 if interrupted else exit_status(report, fail_on)
