"""Look up findings by code, by prefix of codes, or by name."""

from collections.abc import Iterable

from normscope.errors import UsageError, nearest
from normscope.rules.finding import Finding
from normscope.rules.rule import RULES, Rule


def find_rule(code_or_name: str) -> Rule:
    """The rule of that code or name, in any case.

    Raises:
        UsageError: no such finding; the message names the nearest one.
    """
    wanted = code_or_name.strip().lower()
    for rule in RULES.values():
        if wanted in (rule.code.lower(), rule.name):
            return rule
    raise UsageError(f"no finding {code_or_name!r}", f"a code {_span()} or its name", _nearest(wanted))


def parse_codes(codes: str | Iterable[str]) -> tuple[str, ...]:
    """Split the value of `--select` or `--ignore`, "NS101,NS5,post-ln-deep" or a list of those, into codes.

    Raises:
        UsageError: a code fits no finding.
    """
    text = codes if isinstance(codes, str) else ",".join(codes)
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    for code in parts:
        if not any(_fits(rule.code, rule.name, code) for rule in RULES.values()):
            expected = f"a code {_span()}, a prefix such as NS5, or a name"
            raise UsageError(f"no finding {code!r}", expected, _nearest(code.lower()))
    return parts


def matches(finding: Finding, code: str) -> bool:
    """True where `code` (a code, a prefix of codes or a name, in any case) selects this finding."""
    return _fits(finding.code, finding.name, code)


def _fits(code: str, name: str, wanted: str) -> bool:
    wanted = wanted.strip().lower()
    return wanted == name or (wanted.startswith("ns") and code.lower().startswith(wanted))


def _span() -> str:
    return f"{min(RULES)}…{max(RULES)}"


def _nearest(wanted: str) -> str:
    by_key = {key: rule for rule in RULES.values() for key in (rule.code, rule.name)}
    near = nearest(wanted, by_key)
    if near is None:
        return "see docs/findings.md for all of them"
    return f"the nearest is {by_key[near].code} ({by_key[near].name})"
