"""`normscope train CONFIG | MODEL | FOLDER`: train one model, or resume a run."""

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

OF_RUN = "Training"
OF_DATA = "Data"


def _option(help: str, panel: str = OF_RUN, **more: Any) -> Any:
    return options.option(help, rich_help_panel=panel, **more)


def command(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|MODEL|FOLDER",
            help="A TOML file whose keys are the options below and [bold]model[/bold]; or a MODEL as in "
            "`normscope check`, such as nn:decoder,depth=4; or, with --resume, the folder of a run.",
            show_default=False,
        ),
    ],
    optimizer: Annotated[
        str | None, _option("Optimiser: adamw, adam, sgd (momentum 0.9) or muon. Default: adamw.")
    ] = None,
    lr: Annotated[float | None, _option("Learning rate after warm-up. Default: 3e-4.")] = None,
    warmup: Annotated[int | None, _option("Steps of linear warm-up. Default: 0.")] = None,
    schedule: Annotated[
        str | None,
        _option(
            "Learning rate after warm-up: constant, cosine, or wsd (constant, then a linear decay). "
            "Default: constant."
        ),
    ] = None,
    lr_end: Annotated[
        float | None,
        _option("Final learning rate of cosine and wsd, as a fraction of --lr. Default: 0.1."),
    ] = None,
    decay_steps: Annotated[int | None, _option("Steps of wsd's decay. Default: a fifth of --steps.")] = None,
    steps: Annotated[int | None, _option("Optimiser steps. Default: 300.")] = None,
    accumulation: Annotated[
        int | None, _option("Batches per step; their gradients are averaged. Default: 1.")
    ] = None,
    clip: Annotated[
        float | None, _option("Clip the norm of all gradients together to this. Default: no clipping.")
    ] = None,
    precision: Annotated[
        str | None,
        _option(
            "float32, or autocast to bfloat16 or float16 (with loss scaling). Default: float32, which keeps "
            "the model's own type."
        ),
    ] = None,
    eps: Annotated[float | None, _option("Adam's ε. Default: the optimiser's own.")] = None,
    beta1: Annotated[float | None, _option("Adam's decay rate of the mean. Default: 0.9.")] = None,
    beta2: Annotated[float | None, _option("Adam's decay rate of the squares. Default: 0.999.")] = None,
    weight_decay: Annotated[float | None, _option("Weight decay. Default: the optimiser's own.")] = None,
    seed: Annotated[int | None, _option("Random seed of weights, batches and dropout. Default: 0.")] = None,
    device: Annotated[str | None, _option("Device to run on: cpu, cuda, cuda:1, … Default: cpu.")] = None,
    parallel: Annotated[
        str | None,
        _option("With torchrun: ddp copies the model to each process, fsdp shards it. Default: ddp."),
    ] = None,
    text: options.Text = None,
    source: options.Source = None,
    target: options.Target = None,
    images: options.Images = None,
    batch_size: Annotated[
        int | None, _option("Sequences per batch, over all processes. Default: 4.", OF_DATA)
    ] = None,
    seq_len: Annotated[int | None, _option("Tokens per sequence. Default: 64.", OF_DATA)] = None,
    validation: Annotated[
        float | None,
        _option("Fraction of the data, at its end, held out for validation. Default: 0.1.", OF_DATA),
    ] = None,
    validate_every: Annotated[
        int | None, _option("Steps between two validation losses. Default: a tenth of --steps.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the run. Default: runs/NAME-HASH."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last checkpoint; start if there is none."),
    ] = False,
    checkpoint_every: Annotated[
        str | None, _option("Steps (100) or seconds (60s) between two checkpoints. Default: 60s.")
    ] = None,
    format: Annotated[TextOrJson, typer.Option(help="Format of the summary.")] = TextOrJson.TEXT,
    traceback: options.Traceback = False,
) -> int:
    """Train one model, with checkpoints; after a kill or a crash, --resume continues the same run.

    Example: normscope train nn:decoder,scheme=pre,depth=4,width=64 --lr 3e-3 --output runs/pre

    On several devices or hosts: `torchrun --nproc-per-node 2 -m normscope train …`.

    The folder of the run holds its page, run.html: verdict, loss, learning rate and gradient norm by step.

    Exit status: 0 the run is complete; 2 it cannot be run; 130 Ctrl-C, after a checkpoint was written.
    """
    config, folder = _asked_for(context)
    with redirect_stdout(sys.stderr), quiet_libraries():
        summary = _run(config, folder, resume, parallel)
    if summary is not None:  # only the first process prints
        _show(summary, format)
    return 130 if summary is not None and summary.run.interrupted else 0


def _asked_for(context: typer.Context) -> tuple["RunConfig", Path]:
    """The config, with absolute paths, and the folder of the run. Options override the config."""
    from normscope.train import RunConfig
    from normscope.train.folder import CONFIG, default_folder
    from normscope.train.run_config import KEYS, read_table

    what, output, resume = (context.params[name] for name in ("what", "output", "resume"))
    given = {k: v for k, v in context.params.items() if k in KEYS and v is not None}
    path = Path(what)
    if path.is_dir():
        if not resume:
            raise UsageError(
                f'folder "{what}" without --resume', "a CONFIG or a MODEL", "add --resume to continue the run"
            )
        if not (path / CONFIG).exists():
            raise UsageError(
                f'folder "{what}" without a {CONFIG}', "the folder of a run", "name another folder"
            )
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
    """Train, and write the model of a complete run; None in all processes but the first."""
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
                print(f'To continue: normscope train "{folder}" --resume', file=sys.stderr)
            return _with_page(Summary(run), folder) if processes.is_first else None
        model = whole_model(run)
        if model is None:
            return None
        write_model(model, folder / "model")
        written = sample(model, run.subject, config.trial.seed)
        return _with_page(Summary(run, folder / "model", written), folder)


def _with_page(summary: "Summary", folder: Path) -> "Summary":
    """Write the page of the run into its folder; return the summary with its path."""
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
