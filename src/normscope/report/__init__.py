"""Showing: the report, its JSON, the terminal, the HTML page."""

from normscope.report.reading import print_anatomy, text_anatomy
from normscope.report.report import SCHEMA, Report
from normscope.report.terminal import print_markdown, print_report, text_report

__all__ = [
    "SCHEMA",
    "Report",
    "print_anatomy",
    "print_markdown",
    "print_report",
    "text_anatomy",
    "text_report",
]
