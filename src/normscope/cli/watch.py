"""`normscope watch RUN`: a run of `normscope.Monitor`, seen from another process."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.options import TextOrJson, option
from normscope.cli.output import emit

if TYPE_CHECKING:
    from normscope.monitor.scene import Watcher


def command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Store of the run, such as run.db: the file that its Monitor writes.",
            show_default=False,
        ),
    ],
    quantity: Annotated[
        str | None,
        option(
            "Quantity of the heat map, such as gradient/block; an unknown name lists those of the run. "
            "Default: stream/rms.",
            metavar="NAME",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Time between two pictures.")
    ] = 1.0,
    format: Annotated[
        TextOrJson, typer.Option(help="Format of the output; json is printed once.")
    ] = TextOrJson.TEXT,
) -> int:
    """Show a training run while it goes on, or after it: loss, heat map of depth by step, alarms.

    Example: normscope watch run.db --quantity gradient/block

    It reads the store that `normscope.Monitor(model, optimizer, store="run.db")` writes, on the same machine,
    and does not disturb the run. On a terminal the picture is drawn again until the run ends or Ctrl-C; in a
    pipe it is printed once.

    State: running; silent (no write for at least 10 s and three flushes); gone (the process died without an
    end); failed; ended. "!" marks a column with a value that is not finite.

    Exit status: 0 shown; 2 no such store, or no such quantity; 130 Ctrl-C.
    """
    from normscope.monitor.scene import Watcher

    watcher = Watcher(run, quantity)
    if format is TextOrJson.JSON:
        emit(json.dumps(watcher.look().to_dict(), indent=2, allow_nan=False) + "\n", None)
    elif once or not sys.stdout.isatty():
        _print(watcher)
    else:
        _follow(watcher, interval)
    return 0


def _print(watcher: "Watcher") -> None:
    from normscope.cli.watch_view import picture
    from normscope.report.console import show

    scene = watcher.look()
    show(lambda width: picture(scene, width, ascii_only=_is_ascii()))


def _follow(watcher: "Watcher", interval: float) -> None:
    """Draw the picture until the run is over."""
    from rich.console import Console, Group
    from rich.live import Live

    from normscope.cli.watch_view import picture

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            scene = watcher.look()
            parts = picture(scene, console.width, console.height - 1, ascii_only=_is_ascii())
            live.update(Group(*parts), refresh=True)
            if scene.is_over:
                return
            time.sleep(interval)


def _is_ascii() -> bool:
    """True if stdout's encoding lacks the block characters of the picture."""
    return not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
