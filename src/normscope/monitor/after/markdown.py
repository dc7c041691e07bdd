"""Report on a run as a few lines of Markdown, for a pull request or a job's summary."""

from collections.abc import Iterator

from normscope.monitor.after.report import RunReport
from normscope.monitor.after.words import Family, event_line, families, figure_lines, look_lines, state_line
from normscope.report.markdown import block, code, text
from normscope.report.sites import compress

MOST_FINDINGS = 12
MOST_EVENTS = 6


def render_markdown(report: RunReport, command: str | None = None) -> str:
    """Verdict, first wrong value, findings and figures; 60 lines at most.

    Args:
        command: the shell command that made the report.
    """
    return "\n".join(_lines(report, command)) + "\n"


def _lines(report: RunReport, command: str | None) -> Iterator[str]:
    scene, several = report.scene, len(report.scene.ranks) > 1
    yield f"### normscope: {report.verdict}"
    yield ""
    yield f"{code(f'{scene.path.name} {report.model}'.strip())}: {text(report.why)}"
    yield ""
    if scene.wrong is not None:
        place = event_line(scene.wrong, several)
        yield f"- **first wrong value** at {place}: {text(scene.wrong.sentence)}"
    found = families(report.findings)
    if not found:
        yield "No findings."
    for family in found[:MOST_FINDINGS]:
        yield from _family(family)
    if len(found) > MOST_FINDINGS:
        yield f"- and {len(found) - MOST_FINDINGS} more"
    for event in report.rescues[-MOST_EVENTS:]:
        yield f"- **rescue** at {event_line(event, several)}: {text(event.sentence)}"
    for label, words in list(look_lines(report))[-MOST_EVENTS:]:
        yield f"- **look** {label}: {text(words)}"
    yield ""
    yield "| the run | |"
    yield "|---|---|"
    yield f"| state | {text(state_line(report))} |"
    for name, words in figure_lines(report):
        yield f"| {name} | {text(words)} |"
    if report.notes:
        yield f"| not watched | {text('; '.join(report.notes))} |"
    if command is not None:
        yield ""
        yield "To run it again:"
        yield ""
        yield from block(command)
    if found:
        yield ""
        yield "`normscope explain CODE` explains a finding and its threshold."


def _family(family: Family) -> Iterator[str]:
    finding = family.first.finding
    sites = code(compress(finding.sites))
    at = f" at {sites}" if sites else ""
    words = f"{finding.message} {family.more}".rstrip()
    head = f"- **{finding.severity}** {code(f'{finding.code} {finding.name}')}"
    yield f"{head}, {family.place}{at}: {text(words)}"
    if finding.remedy:
        yield f"  → {text(finding.remedy)}"
