"""`normscope demo`: the effect in two minutes."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.output import emit, require_writable

if TYPE_CHECKING:
    from normscope.demo.run import Story
    from normscope.demo.settings import Settings


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="Where the page goes.")
    ] = Path("out/demo.html"),
) -> int:
    """A deep Transformer that does not train, why not, and what rescues it: 15 small runs, then a page.

    Loss against the unigram line (what ignoring the context can reach), beside how much the tokens of the
    last hidden state still differ. Ctrl-C shows what there is until then.
    """
    from normscope.demo.settings import Settings

    return tell(Settings(), output)


def tell(settings: "Settings", output: Path) -> int:
    """Run the demo with these settings, show it, and write its page; the exit status."""
    from normscope.demo.page import render_page
    from normscope.demo.run import moral

    with contextlib.suppress(OSError):
        output.parent.mkdir(parents=True, exist_ok=True)
    require_writable(output)
    story = _watched(settings) if sys.stdout.isatty() else _listed(settings)
    if story.interrupted:
        print("normscope: interrupted; this is what was seen until then", file=sys.stderr)
    if any(course.losses for course in story.courses.values()):
        print(moral(story))
        emit(render_page(story), output, instead=str)  # the table was shown already
        print(f"The page: {output}")
    return 130 if story.interrupted else 0


def _watched(settings: "Settings") -> "Story":
    """Run on a terminal: a picture that is redrawn while the runs train, and stays."""
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
    """Run in a pipe: print a few lines on the way, and the table."""
    from rich.console import Console

    from normscope.cli.demo_view import Lines, table
    from normscope.demo.run import run
    from normscope.report.console import show

    story = run(settings, Lines())
    show(lambda width: [table(story)], Console(width=120))
    return story
