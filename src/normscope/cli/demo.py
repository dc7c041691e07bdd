"""`normscope demo`: the effect in two minutes."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.output import emit, format_for, require_writable

if TYPE_CHECKING:
    from normscope.demo.run import Story
    from normscope.demo.settings import Settings


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="Write the HTML page to this file.")
    ] = Path("out/demo.html"),
) -> int:
    """Show a deep Transformer that fails to train, why, and what rescues it: 15 runs in about two minutes.

    Two plots: the loss, with the unigram entropy (the best loss of a model that ignores the context), and the
    token diversity of the last hidden state (0: all tokens are equal). Ctrl-C writes the results so far.

    Exit status: 0 done; 2 the page cannot be written; 130 Ctrl-C.
    """
    from normscope.demo.settings import Settings

    return tell(Settings(), output)


def tell(settings: "Settings", output: Path) -> int:
    """Run the demo, show it and write its page; return the exit status."""
    from normscope.demo.page import render_page
    from normscope.demo.run import moral

    with contextlib.suppress(OSError):
        output.parent.mkdir(parents=True, exist_ok=True)
    require_writable(output)
    format_for(output, ["html"])
    story = _watched(settings) if sys.stdout.isatty() else _listed(settings)
    if story.interrupted:
        print("normscope: interrupted; these are the results so far", file=sys.stderr)
    if any(course.losses for course in story.courses.values()):
        print(moral(story))
        emit(render_page(story), output, instead=str)  # the table was shown already
        print(f"Page: {output}")
    return 130 if story.interrupted else 0


def _watched(settings: "Settings") -> "Story":
    """Run on a terminal, with a picture that is redrawn during training."""
    from rich.console import Console
    from rich.live import Live

    from normscope.cli.demo_view import picture
    from normscope.demo.run import run

    console = Console()
    with Live(console=console, refresh_per_second=4, vertical_overflow="visible") as live:
        story = run(settings, lambda story: live.update(picture(story, console.width)))
        live.update(picture(story, console.width))
    return story


def _listed(settings: "Settings") -> "Story":
    """Run in a pipe: print progress lines, then the table."""
    from rich.console import Console

    from normscope.cli.demo_view import Lines, table
    from normscope.demo.run import run
    from normscope.report.console import show

    story = run(settings, Lines())
    show(lambda width: [table(story)], Console(width=120))
    return story
