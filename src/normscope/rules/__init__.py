"""Judging: one file a family of findings."""

from normscope.rules import structure, signal, forecast  # noqa: F401, I001  (in the order of their codes)
from normscope.rules.codes import matches, parse_codes
from normscope.rules.explain import explain
from normscope.rules.finding import Finding, Severity
from normscope.rules.judge import Verdict, judge, verdict
from normscope.rules.rule import RULES, Case, Context, Hit, Rule, rule

__all__ = [
    "RULES",
    "Case",
    "Context",
    "Finding",
    "Hit",
    "Rule",
    "Severity",
    "Verdict",
    "explain",
    "judge",
    "matches",
    "parse_codes",
    "rule",
    "verdict",
]
