"""`normscope watch`: a run of `normscope.Monitor`, seen from another process; or a script, run under one."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from normscope.cli.options import TextOrJson, option, spelled, typed
from normscope.cli.output import emit
from normscope.cli.script_words import SCRIPT
from normscope.errors import UsageError

if TYPE_CHECKING:
    from normscope.monitor.scene import Watcher


OF_SCRIPT = {"store", "every", "module", "resume", "overwrite", "look_every", "rescue"}
"""Options of the form with a training script; the others are of the form with a RUN."""
OF_PAGE = {"port", "open_"}
"""Options of the page."""
DEFAULT_STORE = Path("normscope-run.db")
EVERY = 10


def command(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Store of the run, such as run.db: the file that its Monitor writes.",
            show_default=False,
        ),
    ] = None,
    quantity: Annotated[
        str | None,
        option(
            "Quantity of the heat map, such as gradient/block; an unknown name lists those of the run. "
            "Default: stream/rms.",
            metavar="NAME",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        option(
            "Rank whose loss and heat map are shown, in a run of several processes. Default: the first.",
            metavar="N",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        option(
            "Store of another run, for example a good one: show both, and where they part.",
            metavar="GOOD",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Serve a page to this machine's browser, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="PORT", help="With --page: port of the page; 0: a free one."),
    ] = 0,
    open_: Annotated[
        bool, typer.Option("--open", help="With --page: open it in the browser, where there is one.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Time between two pictures.")
    ] = 1.0,
    format: Annotated[
        TextOrJson, typer.Option(help="Format of the output; json is printed once.")
    ] = TextOrJson.TEXT,
    store: Annotated[
        Path,
        typer.Option(metavar="FILE", help="With a script: store that is written."),
    ] = DEFAULT_STORE,
    every: Annotated[
        int,
        typer.Option(min=1, metavar="STEPS", help="With a script: steps between two looks at all figures."),
    ] = EVERY,
    module: Annotated[
        str | None,
        option("With a script: class of the module to watch, where several train.", metavar="CLASS"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With a script: go on with the run that the store holds.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="With a script: replace the run that the store holds."),
    ] = False,
    look_every: Annotated[
        int | None,
        option(
            "With a script: run the probes of check on its model every STEPS steps and at alarms; each takes "
            "the time of about ten steps.",
            min=1,
            metavar="STEPS",
        ),
    ] = None,
    rescue: Annotated[
        str | None,
        option(
            "With a script: what to do where it goes wrong, some of skip, clip, lower=FACTOR and back=STEPS. "
            "Default: only watch.",
            metavar="ACTIONS",
        ),
    ] = None,
) -> int:
    """Show a training run, or run a training script under a monitor.

    Example: normscope watch -- python train.py --its --own=options

    With `--` and a command, run the command as it is, to its end, and write what a `normscope.Monitor` sees
    to the store: the file need not mention normscope. Output, input, signals and exit status are the
    script's own. Alarms go to stderr, one line each; the last line says how many there were. A step ends
    with the last optimizer's step; the loss is the sum of what was differentiated in it. Every process of
    torchrun or accelerate is watched. An error of the monitor ends the monitor, not the script.

    To run the command again, add --overwrite, or --store with another file: a store that holds a run is not
    overwritten without being told to. --resume adds the new steps to it.

    Example: normscope watch run.db --quantity gradient/block

    With the store of a run, show it while it goes on, or after it: loss, heat map of depth by step, alarms.
    This reads the store, also one that `normscope.Monitor(model, optimizer, store="run.db")` writes, on the
    same machine, and does not disturb the run. On a terminal the picture is drawn again until the run ends or
    Ctrl-C; in a pipe it is printed once.

    Example: normscope watch run.db --page

    Print the address of a page that shows the same and goes on by itself: heat map, loss, alarms at their
    steps. Only this machine can reach it, and only with the token in the address.

    Example: normscope watch run.db --against good.db

    Show two runs: the loss of both, the ratio of their figures by depth and step, and the step, quantity and
    site where they part: where they differ by more than they did before, for 5 rows. Two healthy runs with
    different seeds do not part.

    State: running; silent (no write for at least 10 s and three flushes); gone (the process died without an
    end); failed; ended. "!" marks a column with a value that is not finite.

    Exit status: that of the script; or 0 shown; 2 no such store or quantity, or the port is in use; 130
    Ctrl-C.
    """
    if context.meta[SCRIPT] is not None:
        _run(context, context.meta[SCRIPT])
    _require_one_run(context)

    if against is not None and against.resolve() == Path(context.params["run"]).resolve():
        raise UsageError(f"--against {against} (the same store)", "the store of another run", "name another")

    from normscope.monitor.scene import Watcher

    watcher = Watcher(Path(context.params["run"]), quantity, rank, against)
    if page:
        _serve(context, watcher)
    elif format is TextOrJson.JSON:
        emit(json.dumps(watcher.look().to_dict(), indent=2, allow_nan=False) + "\n", None)
    elif once or not sys.stdout.isatty():
        _print(watcher)
    else:
        _follow(watcher, interval)
    return 0


def _run(context: typer.Context, words: list[str]) -> NoReturn:
    """Become the script; see `command`."""
    from normscope.monitor.launch import start

    given = context.params
    if given["run"] != words[0] or context.args != words[1:]:
        both = f'RUN "{given["run"]}" and `{shlex.join(words)}` after --'
        raise UsageError(both, "one of the two", "leave one out")
    for name in typed(context) - OF_SCRIPT - {"run"}:
        given_too = f"{spelled(context, name)} with a training script"
        raise UsageError(given_too, "an option of the picture", "leave it out")
    start(words, **{name: given[name] for name in OF_SCRIPT})


def _require_one_run(context: typer.Context) -> None:
    """Raise UsageError unless the store of a run was given, with options of its picture alone."""
    run = context.params["run"]
    if run is None:
        raise UsageError(
            "neither RUN nor a command",
            "the store of a run, or a training script",
            "write watch run.db, or watch -- python train.py",
        )
    if context.args:
        given = f'"{" ".join(context.args)}" after RUN "{run}"'
        raise UsageError(given, "one RUN", "write -- before the command of a training script")
    names = typed(context)
    for name in names & OF_SCRIPT:
        raise UsageError(f"{spelled(context, name)} with RUN", "a training script after --", "leave it out")
    if "page" in names:
        for name in names & {"once", "interval", "format"}:
            raise UsageError(
                f"{spelled(context, name)} with --page", "an option of the page", "leave one of them out"
            )
    else:
        for name in names & OF_PAGE:
            given = f"{spelled(context, name)} without --page"
            raise UsageError(given, "an option of the picture", "add --page")


def _serve(context: typer.Context, watcher: "Watcher") -> NoReturn:
    """Print the address of the page and serve it until Ctrl-C."""
    from normscope.monitor.page import Figures, document
    from normscope.monitor.serve import Server

    watcher.look()  # a store that cannot be read is said here, not on the page
    figures = Figures(watcher.path, watcher.quantity, watcher.rank, context.params["against"])
    with Server(document(watcher.path.name), figures, context.params["port"]) as server:
        print(server.url, flush=True)
        print("normscope: the page is served to this machine until Ctrl-C", file=sys.stderr)
        if context.params["open_"]:
            server.open_browser()
        server.serve_forever()
    raise AssertionError("the server ended by itself")


def _print(watcher: "Watcher") -> None:
    from normscope.cli.watch_view import picture
    from normscope.report.console import is_ascii, show

    scene = watcher.look()
    show(lambda width: picture(scene, width, ascii_only=is_ascii()))


def _follow(watcher: "Watcher", interval: float) -> None:
    """Draw the picture until the run is over."""
    from rich.console import Console, Group
    from rich.live import Live

    from normscope.cli.watch_view import picture
    from normscope.report.console import is_ascii

    console, ascii_only = Console(highlight=False), is_ascii()  # Live puts another stream in stdout's place
    with Live(console=console, auto_refresh=False) as live:
        while True:
            scene = watcher.look()
            parts = picture(scene, console.width, console.height - 1, ascii_only=ascii_only)
            live.update(Group(*parts), refresh=True)
            if scene.is_over:
                return
            time.sleep(interval)
