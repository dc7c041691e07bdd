"""`normscope map`: train a grid of models and draw which of them train."""

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.map_progress import map_progress
from normscope.cli.options import BatchSize, Device, Format, SeqLen, Text, Traceback, option, typed
from normscope.cli.output import emit, format_for, require_writable
from normscope.cli.progress import quiet_libraries
from normscope.completion import complete_schemes
from normscope.errors import UsageError
from normscope.option_values import counts, rates, seeds, words

if TYPE_CHECKING:
    from normscope.maps import Cell, Store
    from normscope.maps.page import Sheet

DEFAULT_MODEL, DEFAULT_STORE = "nn:decoder,width=32,heads=2", Path("map.sqlite")
AXES = ("schemes", "depths", "inits", "lrs", "warmups", "seeds")
OF_ENGINE = ("engine", "workers", "stack", "early_stop", "ray_address")
SHOWN = ("store", "format", "output", "png", "parquet", "traceback")
"""Options that set how a map is shown; every other option sets how it is trained."""


def command(
    context: typer.Context,
    schemes: Annotated[
        str | None,
        option(
            "Schemes, listed by `normscope schemes`: post,pre,deepnorm.",
            metavar="A,B,…",
            autocompletion=complete_schemes,
        ),
    ] = None,
    depths: Annotated[str | None, option("Numbers of blocks: 4,8,16,32.", metavar="N,N,…")] = None,
    lrs: Annotated[
        str | None,
        option(
            "Learning rates: 1e-4,3e-4, or FIRST:LAST:COUNT on a log scale: 1e-4:3e-2:8. Default: 3e-4.",
            metavar="RATES",
        ),
    ] = None,
    warmups: Annotated[str, typer.Option(metavar="N,N,…", help="Steps of linear warm-up: 0,200.")] = "0",
    seeds: Annotated[
        str, typer.Option(metavar="N", help="Number of seeds, from 0 (3), or a list of seeds (0,7).")
    ] = "1",
    inits: Annotated[
        str | None, option("Initialisations, such as xavier. Default: each scheme's own.", metavar="A,B,…")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Model that the grid varies; any MODEL of `check`.")
    ] = DEFAULT_MODEL,
    width: Annotated[int | None, option("Width of an nn: model. Default: that of --model.", min=1)] = None,
    heads: Annotated[
        int | None, option("Attention heads of an nn: model. Default: those of --model.", min=1)
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Optimiser: adamw, adam, sgd (momentum 0.9) or muon.")
    ] = "adamw",
    steps: Annotated[int, typer.Option(min=1, help="Training steps per cell.")] = 300,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 64,
    text: Text = None,
    device: Device = "cpu",
    store: Annotated[
        Path, typer.Option(metavar="FILE", help="SQLite file that keeps the results.")
    ] = DEFAULT_STORE,
    engine: Annotated[
        str, typer.Option(help="local (processes on this machine) or ray (a Ray cluster).")
    ] = "local",
    workers: Annotated[
        int | None, option("Number of processes. Default: one per core; on a GPU at most 4.", min=1)
    ] = None,
    stack: Annotated[
        int | None,
        option("Cells that a process trains at once. Default: measured in the first seconds.", min=1),
    ] = None,
    ray_address: Annotated[str | None, option("Address of the Ray cluster; with --engine ray.")] = None,
    early_stop: Annotated[
        bool,
        typer.Option("--early-stop/--no-early-stop", help="Stop cells as soon as they are certain to fail."),
    ] = True,
    retry_crashed: Annotated[
        bool, typer.Option("--retry-crashed", help="Train again the cells that crashed.")
    ] = False,
    format: Annotated[Format, typer.Option(help="Format of the output on stdout.")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="HTML page, or JSON if the name ends in .json. Default: the path of --store with the ending "
            ".html.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[Path | None, option("Also write the picture to this PNG file.", metavar="FILE")] = None,
    parquet: Annotated[
        Path | None,
        option("Also write cells and loss curves here; needs normscope\\[parquet].", metavar="FILE"),
    ] = None,
    traceback: Traceback = False,
) -> int:
    """Train every combination of scheme, depth, learning rate, warm-up and seed; draw which of them train.

    Example: normscope map --schemes post,pre --depths 4,8,16 --lrs 1e-4:3e-2:6 --seeds 2

    Each combination (a cell) is trained once. The same command continues after Ctrl-C, a crash or a reboot.
    Two such commands at once share the cells. With more values, only the new cells are trained. Without
    --schemes, --depths, --lrs, --warmups, --seeds or --inits it shows the results in --store.

    A run trains if the mean loss of its last 20 steps is at least 0.1 nats below the unigram entropy of the
    text: the best loss of a model that ignores the context.
    """
    given = SimpleNamespace(**context.params)
    given.output = store.with_suffix(".html") if output is None else output
    _require_files({"--store": store, "--output": given.output, "--png": png, "--parquet": parquet})
    for flag, path, formats in (("--png", png, ["png"]), ("--parquet", parquet, ["parquet"])):
        format_for(path, formats, option=flag)
    given.file_format = format_for(given.output, ["html", "json"])
    if _has_grid(context):
        return _train(given)
    from normscope.maps import Store

    with Store(store, reading=True) as kept:
        _show(kept, given)
    return 0


def _train(given: SimpleNamespace) -> int:
    """Train the missing cells and show the map; return the exit status. A bad call creates no store."""
    from normscope.maps import Store, run_map
    from normscope.maps.run import require_engine, settings

    require_engine(given.engine, given.ray_address)
    with redirect_stdout(sys.stderr), quiet_libraries():
        cells = _cells(given)
        common = settings(cells)
    interrupted = False
    with Store(given.store) as kept:
        if given.retry_crashed:
            kept.retry_crashed()
        try:
            with redirect_stdout(sys.stderr), quiet_libraries(), map_progress() as progress:
                options = {name: getattr(given, name) for name in OF_ENGINE}
                run_map(kept, cells, common=common, progress=progress, **options)
        except KeyboardInterrupt:
            interrupted = True
            print("normscope: interrupted; run the same command to continue", file=sys.stderr)
        if kept.note("settings") is not None:
            kept.remember("command", shlex.join(["normscope", *sys.argv[1:]]))
            _show(kept, given)
    return 130 if interrupted else 0


def _cells(given: SimpleNamespace) -> "tuple[Cell, ...]":
    """The cells of the grid that the options name."""
    from normscope.maps import Grid
    from normscope.maps.grid import with_options
    from normscope.train import Recipe, RunConfig

    base = RunConfig(
        model=with_options(given.model, width=given.width, heads=given.heads),
        text=None if given.text is None else str(given.text.resolve()),
        batch_size=given.batch_size,
        seq_len=given.seq_len,
        validation=0.0,
        device=given.device,
        trial=Recipe(optimizer=given.optimizer, steps=given.steps),
    )
    read: dict[str, Callable[[str], Any]] = {
        "schemes": partial(words, "--schemes"),
        "depths": partial(counts, "--depths", least=1),
        "inits": partial(words, "--inits"),
        "lrs": rates,
        "warmups": partial(counts, "--warmups"),
        "seeds": seeds,
    }
    values = {axis: read[axis](text) for axis in AXES if (text := getattr(given, axis)) is not None}
    return Grid(base=base, **{"lrs": [base.trial.lr]} | values).cells


def _has_grid(context: typer.Context) -> bool:
    """True if the options name a grid to train; else the store is shown.

    Raises:
        UsageError: no grid is named, but an option that affects training is given.
    """
    given = typed(context)
    if not given.isdisjoint(AXES):
        return True
    wrong = next((name.replace("_", "-") for name in context.params if name in given.difference(SHOWN)), None)
    if wrong is not None:
        raise UsageError(
            f"--{wrong} without a grid",
            "one of --" + ", --".join(AXES),
            f"name the grid, or leave --{wrong} out to show the results in the store",
        )
    return False


def _require_files(paths: Mapping[str, Path | None]) -> None:
    """Raise UsageError before the training if a file cannot be written or is named twice."""
    if paths["--parquet"] is not None:
        from normscope.maps.export import require_pyarrow

        require_pyarrow()
    taken: dict[Path, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        if flag != "--store":  # Store checks its own file
            require_writable(path, flag)
        other = taken.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(
                f"{flag} {path}, which is {other} too", "a different file for each", "name another file"
            )


def _show(store: "Store", given: SimpleNamespace) -> None:
    """Write the results in the store to stdout, in the chosen format, and to the files."""
    from normscope.maps.export import to_json, write_parquet
    from normscope.maps.page import render_page, render_png, sheet_of

    sheet = sheet_of(store)
    if given.format is Format.TEXT:
        _print(sheet)
    page, document = render_page(sheet), to_json(sheet) + "\n"
    if given.format is not Format.TEXT:
        emit(document if given.format is Format.JSON else page, None)
    in_file = document if given.file_format == "json" else page
    emit(in_file, given.output, instead=str)  # nothing is lost if this fails: the store keeps the results
    if given.png is not None:
        emit(render_png(sheet), given.png, option="--png")
    if given.parquet is not None:
        write_parquet(sheet, given.parquet)
    print(f"{'Results' if in_file is document else 'Page'}: {given.output}", file=sys.stderr)


def _print(sheet: "Sheet") -> None:
    from rich.console import Console

    from normscope.maps.words import summary, terminal_table, width_of
    from normscope.report.console import show

    needed = width_of(sheet.table)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, needed)
    for line in summary(sheet.table, sheet.counts, sheet.settings):
        console.print(line, soft_wrap=True)
    show(lambda width: [terminal_table(sheet.table, figures=width >= needed)], console)
