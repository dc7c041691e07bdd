"""Turn figures into findings, and findings into a verdict."""

from collections.abc import Iterable
from typing import Literal

from normscope.anatomy import Anatomy
from normscope.forecast import Forecast
from normscope.probes import Measurements
from normscope.rules.finding import Finding, Severity
from normscope.rules.rule import RULES, Case

Verdict = Literal["will fail", "at risk", "no trial", "healthy", "interrupted"]
_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def judge(
    anatomy: Anatomy, measurements: Measurements, forecast: Forecast | None, dtype: str = "float32"
) -> list[Finding]:
    """All findings, ordered by severity, then depth, then code.

    `dtype` is the precision in effect. Rules skip a quantity that was not measured or is not finite; a value
    that is not finite is itself a finding (NS506).
    """
    case = Case(anatomy, measurements, forecast, dtype)
    found = [finding for rule in RULES.values() for finding in rule.findings(case)]

    def rank(finding: Finding) -> tuple[int, int, str]:
        first = min((case.depth.get(site, len(case.depth)) for site in finding.sites), default=-1)
        return _RANK[finding.severity], first, finding.code

    return sorted(found, key=rank)


def verdict(findings: Iterable[Finding], *, interrupted: bool = False, tried: bool = True) -> Verdict:
    """The verdict: "will fail" with an error among the findings, "at risk" with a warning, else "healthy".

    A model is not healthy where its check was `interrupted`, or where no trial was `tried` ("no trial").
    """
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return "will fail"
    if Severity.WARNING in severities:
        return "at risk"
    if interrupted:
        return "interrupted"
    return "healthy" if tried else "no trial"
