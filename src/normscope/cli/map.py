"""`normscope map`: a grid of trials, where it trains and where not."""

import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.map_progress import map_progress
from normscope.cli.options import BatchSize, Device, Format, SeqLen, Text, Traceback
from normscope.cli.output import emit, require_writable
from normscope.cli.progress import quiet_libraries
from normscope.errors import UsageError

if TYPE_CHECKING:
    from normscope.maps import Cell, Store
    from normscope.maps.page import Sheet

DEFAULT_MODEL = "nn:decoder,width=32,heads=2"


AXES = ("schemes", "depths", "inits", "lrs", "warmups", "seeds")
SHOWN = ("store", "format", "output", "png", "parquet", "traceback")
"""Options that set how a map is shown; every other option sets how it is trained."""


def command(
    context: typer.Context,
    schemes: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Of `normscope schemes`: post,pre,deepnorm.", show_default=False),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Blocks: 4,8,16,32.", show_default=False)
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="1e-4,3e-4, or 1e-4:3e-2:8, eight from 1e-4 to 3e-2, each times the same.",
            show_default=False,
        ),
    ] = None,
    warmups: Annotated[str, typer.Option(metavar="N,N,…", help="Steps of linear warm-up: 0,200.")] = "0",
    seeds: Annotated[str, typer.Option(metavar="N", help="How many; or seeds with commas: 0,7.")] = "1",
    inits: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…", help="Initialisations other than the schemes' own.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="What the grid is built on; any MODEL of `check`.")
    ] = DEFAULT_MODEL,
    width: Annotated[int | None, typer.Option(min=1, help="Of a model of ours.", show_default=False)] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Of a model of ours.", show_default=False)] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd (momentum 0.9) or muon.")] = "adamw",
    steps: Annotated[int, typer.Option(min=1, help="Of each cell.")] = 300,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 64,
    text: Text = None,
    device: Device = "cpu",
    store: Annotated[Path, typer.Option(metavar="FILE", help="Where the cells are kept.")] = Path(
        "map.sqlite"
    ),
    engine: Annotated[str, typer.Option(help="local (processes here) or ray (a cluster).")] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes; by default as many as cores, on a GPU at most 4.", show_default=False
        ),
    ] = None,
    stack: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cells trained at once in a process; measured by default.", show_default=False
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Of the Ray cluster.", show_default=False),
    ] = None,
    early_stop: Annotated[
        bool, typer.Option("--early-stop/--no-early-stop", help="Stop cells that are certain to fail.")
    ] = True,
    retry_crashed: Annotated[
        bool, typer.Option("--retry-crashed", help="Try the cells again that crashed before.")
    ] = False,
    format: Annotated[Format, typer.Option(help="On stdout: text, json, or html, the page.")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page.", show_default=False),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture alone.", show_default=False)
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cells and curves (extra: parquet).", show_default=False),
    ] = None,
    traceback: Traceback = False,
) -> int:
    """Train every combination of scheme, depth, rate, warm-up and seed, and draw where they train.

    Each cell is trained once. Run the same command again after a Ctrl-C, a crash or a reboot, and it goes
    on; run it twice at once, and the two share the cells; give more values, and it trains what is new.
    Without any of these it shows what --store has. The page goes to --output, beside the store by default.

    A run trains when the mean loss of its last 20 steps is 0.1 nats under the unigram entropy of the text.
    """
    given = SimpleNamespace(**context.params)
    given.output = store.with_suffix(".html") if output is None else output
    _require_files({"--store": store, "--output": given.output, "--png": png, "--parquet": parquet})
    if not _has_grid(context):
        _show_store(given)
        return 0
    return _train(given)


def _show_store(given: SimpleNamespace) -> None:
    from normscope.maps import Store

    with Store(given.store, reading=True) as kept:
        show(kept, given.format, given.output, given.png, given.parquet)


def _train(given: SimpleNamespace) -> int:
    """Train what the store does not have and show it; the exit status. No store is made for a bad call."""
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
                names = ("engine", "workers", "stack", "early_stop", "ray_address")
                options = {name: getattr(given, name) for name in names}
                run_map(kept, cells, common=common, progress=progress, **options)
        except KeyboardInterrupt:
            interrupted = True
            print("normscope: interrupted; the same command goes on from here", file=sys.stderr)
        if kept.note("settings") is not None:
            kept.remember("command", shlex.join(["normscope", *sys.argv[1:]]))
            show(kept, given.format, given.output, given.png, given.parquet)
    return 130 if interrupted else 0


def _cells(given: SimpleNamespace) -> "tuple[Cell, ...]":
    """The cells of the grid that the options name."""
    from normscope.maps import Grid
    from normscope.maps.grid import counts, rates, seeds, with_options, words
    from normscope.train import RunConfig, TrialConfig

    base = RunConfig(
        model=with_options(given.model, width=given.width, heads=given.heads),
        text=None if given.text is None else str(given.text.resolve()),
        batch_size=given.batch_size,
        seq_len=given.seq_len,
        validation=0.0,
        device=given.device,
        trial=TrialConfig(optimizer=given.optimizer, steps=given.steps),
    )
    return Grid(
        base=base,
        schemes=words("--schemes", given.schemes) if given.schemes is not None else (),
        depths=counts("--depths", given.depths, least=1) if given.depths is not None else (),
        inits=words("--inits", given.inits) if given.inits is not None else (),
        lrs=rates(given.lrs) if given.lrs is not None else (base.trial.lr,),
        warmups=counts("--warmups", given.warmups),
        seeds=seeds(given.seeds),
    ).cells


def _has_grid(context: typer.Context) -> bool:
    """Whether there is something to train; else the store is shown.

    Raises:
        UsageError: there is not, but an option says how to train it.
    """
    given = [name for name in context.params if _is_typed(context, name)]
    if any(name in AXES for name in given):
        return True
    for name in given:
        if name not in SHOWN:
            raise UsageError(
                f"--{name.replace('_', '-')} without a grid",
                "one of --" + ", --".join(AXES),
                "repeat those of the map, or leave this out to see what the store has",
            )
    return False


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _require_files(paths: Mapping[str, Path | None]) -> None:
    """Raise UsageError, before the long work, where a file cannot be written or is named twice."""
    if paths["--parquet"] is not None:
        from normscope.maps.export import require_pyarrow

        require_pyarrow()
    taken: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if option != "--store":  # opened as a store, which says what is wrong with it
            require_writable(path, option)
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise UsageError(f"{option} {path}, which is {other} too", "a file for each", "name another")


def show(store: "Store", format: Format, output: Path, png: Path | None, parquet: Path | None) -> None:
    """Show what the store has: on stdout in `format`, and in the files."""
    from normscope.maps.export import to_json, write_parquet
    from normscope.maps.page import Sheet, render_page, render_png

    with store.one_moment():
        settings, counts, records = store.note("settings"), store.counts(), store.records()
        stack, commands = store.note("stack"), store.note("command") or ""
    if settings is None:
        raise UsageError(f'store "{store.path}" (empty)', "a map that was begun", "give --schemes and --lrs")
    sheet = Sheet(records, settings, counts, stack, commands)
    if format is Format.TEXT:
        _print(sheet)
    elif format is Format.JSON:
        emit(to_json(sheet) + "\n", None)
    page = render_page(sheet)
    if format is Format.HTML:
        emit(page, None)
    emit(page, output, instead=str)  # the store has it all, and shows it again
    if png is not None:
        emit(render_png(sheet), png, option="--png")
    if parquet is not None:
        write_parquet(sheet, parquet)
    print(f"The page: {output}", file=sys.stderr)


def _print(sheet: "Sheet") -> None:
    from rich.console import Console

    from normscope.maps.words import summary, terminal_table, width_of

    needed = width_of(sheet.table)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, needed)
    for line in summary(sheet.table, sheet.counts, sheet.settings):
        console.print(line, soft_wrap=True)
    console.print(terminal_table(sheet.table, figures=console.width >= needed))
