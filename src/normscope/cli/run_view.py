"""Report on a run from its store, on a terminal: verdict, first wrong value, findings, figures, loss."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from normscope.cli.watch_view import BLOCKS, PLAIN, spark
from normscope.monitor.after.report import RunReport
from normscope.monitor.after.words import (
    Family,
    event_line,
    families,
    figure_lines,
    look_lines,
    looks_line,
    state_line,
)
from normscope.report.console import COLOURS, MARGIN, as_text, indented, is_ascii, labelled, show
from normscope.report.sites import compress

_MOST_EVENTS = 8


def print_run(report: RunReport) -> None:
    """Print the report; colour and width are the terminal's, plain text in a pipe."""
    levels = PLAIN if is_ascii() else BLOCKS
    show(lambda width: _parts(report, width, levels))


def text_run(report: RunReport, width: int = 110) -> str:
    """The same as plain text of `width` columns, for a file."""
    return as_text(lambda width: _parts(report, width, BLOCKS), width)


def _parts(report: RunReport, width: int, levels: str) -> Iterator[RenderableType]:
    scene, several = report.scene, len(report.scene.ranks) > 1
    name = f"{scene.path.name}  {report.model}".rstrip()
    yield Text.assemble((report.verdict, COLOURS[report.verdict]), "  ", (name, "bold"))
    yield labelled("why", report.why)
    yield labelled("run", state_line(report))
    if scene.wrong is not None:
        yield Text("")
        yield Text.assemble(("first wrong value  ", "bold red"), event_line(scene.wrong, several))
        yield indented(Text(scene.wrong.sentence))
    for family in families(report.findings):
        yield Text("")
        yield from _family(family)
    if report.rescues:
        yield Text("")
        yield Text.assemble(("rescues  ", "bold"), str(len(report.rescues)))
        for event in report.rescues[-_MOST_EVENTS:]:
            yield indented(Text(f"{event_line(event, several)}  {event.sentence}"))
    if report.looks:
        yield Text("")
        yield Text.assemble(("looks  ", "bold"), looks_line(report))
        for label, words in list(look_lines(report))[-_MOST_EVENTS:]:
            yield indented(Text(f"{label}  {words}"))
    yield Text("")
    for label, words in figure_lines(report):
        yield labelled(label, words)
    for event in report.events[-_MOST_EVENTS:]:
        yield labelled("event", f"{event_line(event, several)}  {event.kind}  {event.sentence}")
    for note in report.notes:
        yield labelled("note", note)
    if scene.loss is not None:
        yield Text("")
        yield from spark(scene.loss, width, levels)


def _family(family: Family) -> Iterator[RenderableType]:
    finding = family.first.finding
    severity = str(finding.severity)
    sites = compress(finding.sites)
    yield Text.assemble(
        (f"{severity:<{MARGIN}}", COLOURS[severity]),
        (f"{finding.code} {finding.name}", "bold"),
        f"  {family.place}",
        (f"  {sites}" if sites else "", "dim"),
    )
    yield indented(Text(f"{finding.message} {family.more}".rstrip()))
    if finding.remedy:
        yield indented(Text(f"→ {finding.remedy}", style="italic"))
