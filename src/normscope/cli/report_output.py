"""Output of reports and comparisons: in any format, to stdout or a file; the exit status of a check."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from normscope.cli.options import FailOn
from normscope.cli.output import emit
from normscope.interrupts import postponed

if TYPE_CHECKING:
    from normscope.report import Report


class Format(StrEnum):
    """Output formats of a report or a comparison."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"


class Rendered(Protocol):
    """A report in the formats of files."""

    def to_json(self) -> str: ...
    def to_html(self, path: Path | None = None, *, command: str | None = None) -> str: ...
    def to_markdown(self, command: str | None = None) -> str: ...


@dataclass(frozen=True)
class Shown:
    """A report, or a comparison, that is shown.

    Attributes:
        report: the report.
        print: prints it on the terminal.
        text: the report as plain text.
        verdict: sentence that stands on stderr when the report is in a file.
        noun: what the same line calls it.
        page: name of its HTML page where no other is given.
    """

    report: Rendered
    print: Callable[[], None]
    text: Callable[[], str]
    verdict: str
    noun: str = "report"
    page: str = "normscope.html"


def show(report: "Report", format: Format, output: Path | None, command: str | None = None) -> None:
    """Write the report in `format` to stdout or a file; `command` is the call that made it."""
    with postponed(lambda: None):  # imports take seconds, and Ctrl-C meanwhile must not lose the report
        from normscope.report import print_report, text_report
        from normscope.report.words import headline

        verdict = f"{report.model}: {headline(report.verdict, report.forecast, report.ladder)}."
        shown = Shown(report, lambda: print_report(report), lambda: text_report(report), verdict)
        _write(shown, format, output, command)


def write(shown: Shown, format: Format, output: Path | None, command: str | None) -> None:
    """Write a report in `format` to stdout or a file; `command` is the call that made it.

    Ctrl-C meanwhile does not lose it: everything in it was measured.
    """
    with postponed(lambda: None):
        _write(shown, format, output, command)


def _write(shown: Shown, format: Format, output: Path | None, command: str | None) -> None:
    report = shown.report
    if format is Format.HTML and output is None and sys.stdout.isatty():
        output = Path(shown.page)  # a terminal cannot show a page
    if format is Format.HTML:
        emit(report.to_html(command=command), output, instead=shown.text)
    elif format is Format.JSON:
        emit(report.to_json() + "\n", output)
    elif format is Format.MARKDOWN:
        emit(report.to_markdown(command), output)
    elif output is None:
        shown.print()
    else:
        emit(shown.text(), output)
    if output is not None:
        print(f"{shown.verdict} The {shown.noun} is in {output}", file=sys.stderr)


def exit_status(report: "Report", fail_on: FailOn) -> int:
    """1 if a finding is at least as severe as `fail_on`, else 0; "no trial" counts as a warning."""
    severities = {str(finding.severity) for finding in report.findings}
    if report.verdict == "no trial":
        severities.add("warning")
    return status_of(severities, fail_on)


def status_of(severities: set[str], fail_on: FailOn) -> int:
    """1 if one of the severities is at least `fail_on`, else 0."""
    failing = {FailOn.ERROR: ("error",), FailOn.WARNING: ("error", "warning"), FailOn.NEVER: ()}[fail_on]
    return int(not severities.isdisjoint(failing))
