"""The report on a terminal: verdict first, then findings, then the stack block by block."""

import io
import sys

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from normscope.report.report import Report


def print_report(report: Report, console: Console | None = None) -> None:
    """Print `report`; colour and width are the terminal's, plain text in a pipe."""
    console = console or Console(file=sys.stdout, highlight=False)
    console.print(Text(f"{report.model}: {report.verdict}"))
    for finding in report.findings:
        console.print(Text(f"{finding.severity} {finding.code} {finding.name}: {finding.message}"))
        console.print(Text(f"  {finding.remedy}"))


def text_report(report: Report, width: int = 110) -> str:
    """The same as plain text of `width` columns, for a file."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def print_markdown(text: str) -> None:
    """Print Markdown: rendered on a terminal, as it is in a pipe."""
    if sys.stdout.isatty():
        Console(file=sys.stdout).print(Markdown(text))
    else:
        sys.stdout.write(text)
