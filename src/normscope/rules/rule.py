"""Rule: one judgement as data (code, mathematics, threshold, source, remedy), and its function."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from normscope.anatomy import Anatomy
from normscope.forecast import Forecast
from normscope.probes import Measurement, Measurements
from normscope.rules.finding import Finding, Severity


@dataclass(frozen=True)
class Case:
    """All that a rule may read; `dtype` is the precision in effect, the model's own or `--dtype`."""

    anatomy: Anatomy
    table: Measurements
    forecast: Forecast | None = None
    dtype: str = "float32"

    def finite(self, quantity: str) -> dict[str, float]:
        """Site → value of every finite scalar of `quantity`; the others are left to NS506."""
        return {site: float(v) for site, v in self.table.of(quantity).items() if math.isfinite(v)}

    @cached_property
    def depth(self) -> dict[str, int]:
        """Site of a block, branch or norm → the number of its block in the model, 0 first."""
        depth: dict[str, int] = {}
        for index, block in enumerate(self.anatomy.blocks):
            depth.setdefault(block.site, index)
            for branch in block.branches:
                for site in (branch.site, *(norm.path for norm in branch.norms)):
                    depth.setdefault(site, index)
        return depth

    def in_depth(self, sites: Iterable[str]) -> tuple[str, ...]:
        """`sites` in the order of depth; a site outside the blocks (a final norm) comes last."""
        return tuple(sorted(sites, key=lambda site: self.depth.get(site, len(self.depth))))

    def rows(self, sites: Iterable[str], *quantities: str) -> tuple[Measurement, ...]:
        """The measurements of each of `quantities` at `sites`, as evidence."""
        wanted = set(sites)
        return tuple(m for q in quantities for m in self.table if m.quantity == q and m.site in wanted)


@dataclass(frozen=True)
class Hit:
    """One result of a rule's function: a finding without the fields that the rule's record already has.

    `remedy` replaces the rule's own where the case allows a more specific one.
    """

    severity: Severity
    sites: tuple[str, ...]
    message: str
    evidence: tuple[Measurement, ...] = ()
    remedy: str = ""


def note_or_warning(grave: bool) -> Severity:
    """A warning where the finding is grave, else a note."""
    return Severity.WARNING if grave else Severity.NOTE


Judge = Callable[[Case], Iterator[Hit]]


@dataclass(frozen=True)
class Record:
    """Texts of one kind of finding.

    Attributes:
        code, name: stable code and name, "NS101" and "post-ln-deep".
        summary: the finding in one line.
        why: the mathematics, two or three sentences.
        threshold: the limit in words, with the constants of the code in it.
        source: the paper, with its arXiv number, or the measurement that the threshold comes from.
        remedy: advice on what to change.
        remedies: names of `REMEDIES` that apply a part of the advice to a copy.
    """

    code: str
    name: str
    summary: str
    why: str
    threshold: str
    source: str
    remedy: str
    remedies: tuple[str, ...]

    def finding(self, hit: Hit) -> Finding:
        """The finding of one result."""
        return Finding(
            self.code,
            self.name,
            hit.severity,
            hit.sites,
            hit.message,
            hit.evidence,
            self.threshold,
            self.source,
            hit.remedy or self.remedy,
            self.remedies,
        )


@dataclass(frozen=True)
class Rule(Record):
    """One kind of finding about a case.

    Attributes:
        judge: the function; it yields nothing where the figures it needs were not measured.
    """

    judge: Judge

    def findings(self, case: Case) -> Iterator[Finding]:
        """The rule applied to one case."""
        return map(self.finding, self.judge(case))


RULES: dict[str, Rule] = {}
"""Every rule by its code, in the order of the codes; filled by the decorator `rule`."""

ALARMS: dict[str, Record] = {}
"""Every alarm of the monitor by its code; filled by `alarm` when `normscope.monitor.alarms` is imported."""


def rule(code: str, *, remedies: tuple[str, ...] = (), **texts: str) -> Callable[[Judge], Rule]:
    """Enter the decorated function into `RULES` under its own name, with its texts.

    Line breaks and indents of the texts do not count.
    """

    def enter(judge: Judge) -> Rule:
        name = judge.__name__.replace("_", "-")
        assert code not in RULES, f"{code} is taken by {RULES[code].name}"
        assert name not in {r.name for r in RULES.values()}, f"{name} is taken"
        RULES[code] = Rule(code, name, remedies=remedies, judge=judge, **_in_one_line(texts))
        return RULES[code]

    return enter


def alarm(code: str, name: str, **texts: str) -> Record:
    """Enter an alarm of the monitor into `ALARMS`, with its texts.

    Line breaks and indents of the texts do not count.
    """
    taken = [*RULES.values(), *ALARMS.values()]
    assert code not in {each.code for each in taken}, f"{code} is taken"
    assert name not in {each.name for each in taken}, f"{name} is taken"
    ALARMS[code] = Record(code, name, remedies=(), **_in_one_line(texts))
    return ALARMS[code]


def _in_one_line(texts: dict[str, str]) -> dict[str, str]:
    return {field: " ".join(text.split()) for field, text in texts.items()}


def figure(value: float, digits: int = 3) -> str:
    """A figure for a reader: `digits` significant ones, whole numbers up to 99999 in full, 3e-4, 1.23e-9."""
    if 10.0 ** (digits - 1) <= abs(value) < 1e5:
        return f"{value:.0f}"
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
