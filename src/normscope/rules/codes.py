"""Look up findings by code, by prefix of codes, or by name."""

from collections.abc import Iterable, Mapping
from importlib import import_module

from normscope.errors import UsageError, nearest
from normscope.rules.finding import Finding
from normscope.rules.rule import ALARMS, RULES, Record

_ALARMS_HOME = "normscope.monitor.alarms"
"""Package that enters the alarms' records when it is imported: a room below this one, so only named here."""
_PAGES = "docs/findings.md and docs/alarms.md"


def find_record(code_or_name: str) -> Record:
    """The rule or alarm of that code or name, in any case.

    Raises:
        UsageError: no such finding; the message names the nearest one.
    """
    wanted = code_or_name.strip().lower()
    known = _all()
    for record in known.values():
        if wanted in (record.code.lower(), record.name):
            return record
    expected = f"a code {_span(known)} or its name"
    raise UsageError(f"no finding {code_or_name!r}", expected, _nearest(wanted, known, _PAGES))


def parse_codes(codes: str | Iterable[str], *, of: Mapping[str, Record] | None = None) -> tuple[str, ...]:
    """Split the value of `--select` or `--ignore`, "NS101,NS8,post-ln-deep" or a list of those, into codes.

    Args:
        codes: codes, prefixes or names of findings and of alarms.
        of: what must be among them, `RULES` for a model or `ALARMS` for a run; None is any.

    Raises:
        UsageError: a code fits no finding; or none fits those of `of`, so that nothing could be found.
    """
    text = codes if isinstance(codes, str) else ",".join(codes)
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    known = _all() if parts else {}
    for code in parts:
        if not _fits_any(code, known):
            expected = f"a code {_span(known)}, a prefix such as NS5, or a name"
            raise UsageError(f"no finding {code!r}", expected, _nearest(code.lower(), known, _PAGES))
    if of is not None and parts and not any(_fits_any(code, of) for code in parts):
        listed = " and ".join(map(repr, parts))
        if of is ALARMS:
            given, do = f"{listed} alone, which no run raises", "give a MODEL, or select alarms as well"
            raise UsageError(given, f"an alarm of a run, {_span(of)}", do)
        given, do = f"{listed} alone, which only a run can raise", "give the store of a run instead of MODEL"
        raise UsageError(given, f"a finding of a model, {_span(of)}", do)
    return parts


def matches(finding: Finding | Record, code: str) -> bool:
    """True where `code` (a code, a prefix of codes or a name, in any case) selects this finding."""
    return _fits(finding.code, finding.name, code)


def _all() -> Mapping[str, Record]:
    """Every rule and every alarm by its code."""
    import_module(_ALARMS_HOME)
    return RULES | ALARMS


def _fits_any(code: str, known: Mapping[str, Record]) -> bool:
    return any(_fits(record.code, record.name, code) for record in known.values())


def _fits(code: str, name: str, wanted: str) -> bool:
    wanted = wanted.strip().lower()
    return wanted == name or (wanted.startswith("ns") and code.lower().startswith(wanted))


def _span(known: Mapping[str, Record]) -> str:
    return f"{min(known)}…{max(known)}"


def _nearest(wanted: str, known: Mapping[str, Record], pages: str) -> str:
    by_key = {key: record for record in known.values() for key in (record.code, record.name)}
    near = nearest(wanted, by_key)
    if near is None:
        return f"see {pages} for all of them"
    return f"the nearest is {by_key[near].code} ({by_key[near].name})"
