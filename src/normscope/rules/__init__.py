"""Judging: one file a family of findings."""

from normscope.rules.finding import Finding, Severity

__all__ = ["Finding", "Severity"]
