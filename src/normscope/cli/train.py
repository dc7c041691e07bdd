"""`normscope train CONFIG | MODEL`: one run, to its end or on from where it was."""

import dataclasses
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli import options
from normscope.cli.options import TextOrJson
from normscope.cli.output import emit
from normscope.cli.progress import quiet_libraries
from normscope.errors import UsageError

if TYPE_CHECKING:
    from normscope.train import RunConfig
    from normscope.train.summary import Summary

OF_RUN = "The run"
OF_DATA = "What it trains on"


def _option(help: str, panel: str = OF_RUN, **more: Any) -> Any:
    return options.option(help, rich_help_panel=panel, **more)


def command(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|MODEL|FOLDER",
            help="A TOML file whose keys are the options below and [bold]model[/bold]; or a MODEL as "
            "`normscope check` takes it; or, with --resume, the folder of a run.",
            show_default=False,
        ),
    ],
    optimizer: Annotated[str | None, _option("adamw (default), adam, sgd (momentum 0.9) or muon.")] = None,
    lr: Annotated[float | None, _option("The learning rate after warm-up; 3e-4.")] = None,
    warmup: Annotated[int | None, _option("Steps of linear warm-up; 0.")] = None,
    schedule: Annotated[
        str | None,
        _option("constant (default), cosine, or wsd (constant, then falling over the last steps)."),
    ] = None,
    lr_end: Annotated[
        float | None, _option("Share of the learning rate at the end of cosine and wsd; 0.1.")
    ] = None,
    decay_steps: Annotated[int | None, _option("Steps over which wsd falls; a fifth of the run.")] = None,
    steps: Annotated[int | None, _option("Steps of the optimiser; 300.")] = None,
    accumulation: Annotated[int | None, _option("Batches whose mean loss makes a step; 1.")] = None,
    clip: Annotated[float | None, _option("Largest norm of all gradients together; none.")] = None,
    precision: Annotated[
        str | None, _option("float32 (default), or autocast to bfloat16 or float16 (with a scaled loss).")
    ] = None,
    eps: Annotated[float | None, _option("Adam's ε; its own.")] = None,
    beta1: Annotated[float | None, _option("Adam's decay rate of the mean; 0.9.")] = None,
    beta2: Annotated[float | None, _option("Adam's decay rate of the squares; 0.999.")] = None,
    weight_decay: Annotated[float | None, _option("The optimiser's own.")] = None,
    seed: Annotated[int | None, _option("Of weights, batches and dropout; 0.")] = None,
    device: Annotated[str | None, _option("cpu (default), cuda, cuda:1, …")] = None,
    parallel: Annotated[
        str | None,
        _option("Under torchrun: ddp (default) copies the model to each process, fsdp shards it."),
    ] = None,
    text: options.Text = None,
    source: options.Source = None,
    target: options.Target = None,
    images: options.Images = None,
    batch_size: Annotated[int | None, _option("Sequences a batch, over all processes; 4.", OF_DATA)] = None,
    seq_len: Annotated[int | None, _option("Tokens a sequence; 64.", OF_DATA)] = None,
    validation: Annotated[
        float | None, _option("The last share of the data, kept from training; 0.1.", OF_DATA)
    ] = None,
    validate_every: Annotated[
        int | None, _option("Steps between two validation losses; a tenth of the run.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where the run is kept; runs/NAME by default."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, or begin where there is none.")
    ] = False,
    checkpoint_every: Annotated[
        str | None, _option("Steps (100) or seconds (60s) between two checkpoints; 60s.")
    ] = None,
    format: Annotated[TextOrJson, typer.Option(help="How to show it.")] = TextOrJson.TEXT,
    traceback: options.Traceback = False,
) -> int:
    """Train one model; killed at any point, it goes on with --resume as if nothing had been.

    On several devices or hosts: `torchrun --nproc-per-node 2 -m normscope train …`.

    The folder of the run holds its page, run.html: verdict, loss, learning rate and gradient norm by step.

    Exit status: 0 the run came to its end, 2 it cannot be run, 130 Ctrl-C (a checkpoint is written first).
    """
    config, folder = _asked_for(context)
    with redirect_stdout(sys.stderr), quiet_libraries():
        summary = _run(config, folder, resume, parallel)
    if summary is not None:  # of several processes one speaks
        _show(summary, format)
    return 130 if summary is not None and summary.run.interrupted else 0


def _asked_for(context: typer.Context) -> tuple["RunConfig", Path]:
    """The config with the options on top, and the folder of the run. Paths in it are absolute."""
    from normscope.train import RunConfig
    from normscope.train.folder import CONFIG, default_folder
    from normscope.train.run_config import KEYS, read_table

    what, output, resume = (context.params[name] for name in ("what", "output", "resume"))
    given = {k: v for k, v in context.params.items() if k in KEYS and v is not None}
    path = Path(what)
    if path.is_dir():
        if not resume:
            raise UsageError(
                f'folder "{what}" without --resume', "a CONFIG or a MODEL", "go on with --resume"
            )
        if not (path / CONFIG).exists():
            raise UsageError(f'folder "{what}" without a {CONFIG}', "the folder of a run", "name another")
        table = read_table(path / CONFIG)
    elif path.suffix == ".toml":
        table = {key.replace("-", "_"): value for key, value in read_table(path).items()}
    else:
        table = {"model": what}
    config = RunConfig.from_dict(table | given)
    config = config.replace(
        **{name: place and str(place.absolute()) for name, place in config.paths().items()}
    )
    name = path.stem if path.suffix == ".toml" else None
    return config, output or (path if path.is_dir() else default_folder(config, name))


def _run(config: "RunConfig", folder: Path, resume: bool, parallel: str | None) -> "Summary | None":
    """Train, and write the model of a run that came to its end; None in all processes but the first."""
    from normscope.train.finish import sample, whole_model, write_model
    from normscope.train.prepare import prepared
    from normscope.train.processes import joined
    from normscope.train.summary import Summary
    from normscope.train.view import watching

    with (
        joined(parallel, config.device) as processes,
        watching(processes.is_first) as view,
        prepared(config, folder=folder, resume=resume, observers=[view], processes=processes) as run,
    ):
        view.watch(run)
        for note in run.notes if processes.is_first else ():
            print(f"normscope: {note}", file=sys.stderr)
        try:
            run.go()
        except KeyboardInterrupt:
            print(f"normscope: interrupted after step {run.trial.step}", file=sys.stderr)
        if run.interrupted:
            if processes.is_first:
                print(f'To go on: normscope train "{folder}" --resume', file=sys.stderr)
            return _with_page(Summary(run), folder) if processes.is_first else None
        model = whole_model(run)
        if model is None:
            return None
        write_model(model, folder / "model")
        written = sample(model, run.subject, config.trial.seed)
        return _with_page(Summary(run, folder / "model", written), folder)


def _with_page(summary: "Summary", folder: Path) -> "Summary":
    """The same with the run's page written to its folder."""
    from normscope.atomic import disk_refusals, write_text
    from normscope.pipeline import versions
    from normscope.report.train_page import render_train_page
    from normscope.train.folder import GO_ON, PAGE

    summary = dataclasses.replace(summary, page=folder / PAGE)
    with disk_refusals(f'folder "{folder}"', GO_ON):
        write_text(folder / PAGE, render_train_page(summary, versions()))
    return summary


def _show(summary: "Summary", format: TextOrJson) -> None:
    if format is TextOrJson.JSON:
        emit(json.dumps(summary.to_dict(), indent=2, allow_nan=False) + "\n", None)
        return
    print(summary.verdict())
    for name, words in summary.lines():
        print(f"{name:<12}{words}")
