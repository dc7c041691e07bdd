"""Report on a run from its store, on a terminal: verdict, first wrong value, findings, figures, loss."""

import sys
from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normscope.cli.watch_view import BLOCKS, PLAIN, spark
from normscope.monitor.after.report import RunReport, sentence_of
from normscope.monitor.after.words import (
    Family,
    event_line,
    families,
    figure_lines,
    look_lines,
    looks_line,
    state_line,
)
from normscope.report.console import as_text, show
from normscope.report.sites import compress

_COLOURS = {
    "failed": "bold red",
    "at risk": "bold yellow",
    "undecided": "bold cyan",
    "healthy": "bold green",
    "error": "bold red",
    "warning": "bold yellow",
    "note": "bold cyan",
}
_INDENT = 8
_MOST_EVENTS = 8


def print_run(report: RunReport) -> None:
    """Print the report; colour and width are the terminal's, plain text in a pipe."""
    is_ascii = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    show(lambda width: _parts(report, width, PLAIN if is_ascii else BLOCKS))


def text_run(report: RunReport, width: int = 110) -> str:
    """The same as plain text of `width` columns, for a file."""
    return as_text(lambda width: _parts(report, width, BLOCKS), width)


def _parts(report: RunReport, width: int, levels: str) -> Iterator[RenderableType]:
    scene, several = report.scene, len(report.scene.ranks) > 1
    name = f"{scene.path.name}  {report.model}".rstrip()
    yield Text.assemble((report.verdict, _COLOURS[report.verdict]), "  ", (name, "bold"))
    yield _labelled("why", report.why)
    yield _labelled("run", state_line(report))
    if scene.wrong is not None:
        yield Text("")
        yield Text.assemble(("first wrong value  ", "bold red"), event_line(scene.wrong, several))
        yield _indented(Text(sentence_of(scene.wrong)))
    for family in families(report.findings):
        yield Text("")
        yield from _family(family)
    if report.rescues:
        yield Text("")
        yield Text.assemble(("rescues  ", "bold"), str(len(report.rescues)))
        for event in report.rescues[-_MOST_EVENTS:]:
            yield _indented(Text(f"{event_line(event, several)}  {sentence_of(event)}"))
    if report.looks:
        yield Text("")
        yield Text.assemble(("looks  ", "bold"), looks_line(report))
        for label, words in list(look_lines(report))[-_MOST_EVENTS:]:
            yield _indented(Text(f"{label}  {words}"))
    yield Text("")
    for label, words in figure_lines(report):
        yield _labelled(label, words)
    for event in report.events[-_MOST_EVENTS:]:
        yield _labelled("event", f"{event_line(event, several)}  {event.kind}  {sentence_of(event)}")
    for note in report.notes:
        yield _labelled("note", note)
    if scene.loss is not None:
        yield Text("")
        yield from spark(scene.loss, width, levels)


def _family(family: Family) -> Iterator[RenderableType]:
    finding = family.first.finding
    severity = str(finding.severity)
    sites = compress(finding.sites)
    yield Text.assemble(
        (f"{severity:<{_INDENT}}", _COLOURS[severity]),
        (f"{finding.code} {finding.name}", "bold"),
        f"  {family.place}",
        (f"  {sites}" if sites else "", "dim"),
    )
    yield _indented(Text(f"{finding.message} {family.more}".rstrip()))
    if finding.remedy:
        yield _indented(Text(f"→ {finding.remedy}", style="italic"))


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, _INDENT), expand=False)


def _labelled(label: str, words: str) -> RenderableType:
    """A dim label in the margin and words that wrap beside it."""
    grid = Table.grid(padding=0)
    grid.add_column(width=_INDENT)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, style="dim"), Text(words))
    return grid
