"""Judging: one file a family of findings."""

# The families enter their rules into RULES, in the order of their codes.
from normscope.rules import structure, signal, gradient, jacobian, precision, forecast  # noqa: F401, I001
from normscope.rules import wiring_flow, wiring_learning, wiring_start, wiring_recipe, wiring_loss  # noqa: F401
from normscope.rules.codes import matches, parse_codes
from normscope.rules.pages import explain
from normscope.rules.finding import Finding, Severity
from normscope.rules.judging import Verdict, judge, verdict
from normscope.rules.rule import ALARMS, RULES, Case, Hit, Record, Rule, alarm, figure

__all__ = [
    "ALARMS",
    "RULES",
    "Case",
    "Finding",
    "Hit",
    "Record",
    "Rule",
    "Severity",
    "Verdict",
    "alarm",
    "explain",
    "figure",
    "judge",
    "matches",
    "parse_codes",
    "verdict",
]
