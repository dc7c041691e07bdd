"""Compare two reports: verdicts, findings gained and lost, measurements that differ beyond seeds.

Seeds change measurements of one and the same model: over four seeds of two small models, gradients by up to
a factor of 3.1 in the median over the sites, the stream and the attention by up to 1.3. Where both sides have
several reports, of replicas at other seeds, a measurement differs when Welch's t does. With one report on a
side, only an effect counts that is larger than the `FACTORS` here in the median over the sites, or than their
square at one site.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normscope.compare.align import align
from normscope.compare.outcome import Outcome
from normscope.compare.structure import structure_of_report
from normscope.compare.types import Compared, Difference, Pair, Part

Report = Mapping[str, Any]
Site = tuple[str | None, str | None]
FACTORS = {"gradient": 4.0, "forecast": 4.0, "stream": 2.0, "branch": 2.0, "attention": 2.0}
"""First word of a quantity → smallest ratio that counts with one report on a side; 2 for the others."""
_OTHER = 2.0
_LEFT_OUT = ("wiring/", "stream/mean", "forecast/coherence", "forecast/alignment")
"""Quantities around zero, or of single tokens, whose ratio between two seeds has no bound."""
_TINY = 1e-10
_T, _LEAST = 5.0, 1.1
"""With replicas: the t that counts, and the smallest ratio."""
_SEVERITIES = ("note", "warning", "error")


def compare(a: Report | Sequence[Report], b: Report | Sequence[Report]) -> Outcome:
    """Differences between two reports, or between two sets of reports of replicas.

    Args:
        a, b: data of `normscope.report/1` or `normscope.run/1`; both of one kind.
    """
    first, second = (list(each) if isinstance(each, Sequence) else [each] for each in (a, b))
    x, y = first[0], second[0]
    if x.get("schema") != y.get("schema"):
        reason = f"one is a report of a check, the other one of a run ({x.get('schema')}, {y.get('schema')})"
        return Outcome(Compared(Part.VERDICT, "not", (reason,)))
    sites = _sites(x, y)
    found = [*_verdicts(x, y), *_findings(x, y, sites)]
    measured = list(_measurements(first, second, sites))
    found += measured
    why = _why(first, second)
    figures = {"reports": [len(first), len(second)], "measurements": len(measured)}
    said = "" if found else f"the same verdict, {_verdict(x)}, and the same findings"
    return Outcome(Compared(Part.VERDICT, "partly" if why else "whole", why, said, figures), tuple(found))


def _why(first: Sequence[Report], second: Sequence[Report]) -> tuple[str, ...]:
    if first[0].get("schema") == "normscope.run/1":
        return ("of two runs, verdicts, findings and the stored figures are compared",)
    if min(len(first), len(second)) > 1:
        return ()
    return (
        "with one report on a side, a measurement counts only where it differs by a factor of 2 or more "
        "(4 for gradients and trials): less may be the seeds",
    )


def _verdict(report: Report) -> str:
    return str(report.get("verdict"))


def _verdicts(a: Report, b: Report) -> Iterator[Difference]:
    if _verdict(a) != _verdict(b):
        words = f'The verdict is "{_verdict(a)}" in A and "{_verdict(b)}" in B.'
        yield Difference(Part.VERDICT, "verdict", (("", ""),), _verdict(a), _verdict(b), words)


def _sites(a: Report, b: Report) -> dict[str, str]:
    """Sites of A → sites of B, by the aligned structures; others keep their name."""
    found: dict[str, str] = {}
    if "anatomy" not in a or "anatomy" not in b:
        return found

    def walk(pair: Pair) -> None:
        if pair.a is not None and pair.b is not None:
            found[pair.a.name] = pair.b.name
        for part in pair.parts:
            walk(part)

    walk(align(structure_of_report(a), structure_of_report(b)))
    return found


def _findings(a: Report, b: Report, sites: Mapping[str, str]) -> Iterator[Difference]:
    """Findings gained, lost, and of another severity; a finding is known by its code."""
    groups = [_by_code(report) for report in (a, b)]
    for code in dict.fromkeys([*groups[0], *groups[1]]):
        x, y = (group.get(code) for group in groups)
        if x is None and y is not None:
            yield _finding("finding-gained", y, "B", "A")
        elif y is None and x is not None:
            yield _finding("finding-lost", x, "A", "B")
        elif x is not None and y is not None and x["severity"] != y["severity"]:
            words = f"{code} {x['name']} is of severity {x['severity']} in A and {y['severity']} in B."
            places = tuple((site, sites.get(site, site)) for site in x["sites"]) or (("", ""),)
            yield Difference(
                Part.VERDICT, "finding-severity", places, x["severity"], y["severity"], words, (y["message"],)
            )


def _by_code(report: Report) -> dict[str, Mapping[str, Any]]:
    """The gravest finding of each code, all its sites together."""
    found: dict[str, dict[str, Any]] = {}
    for each in report.get("findings", ()):
        known = found.get(each["code"])
        if known is None:
            found[each["code"]] = dict(each)
            continue
        known["sites"] = [*known["sites"], *(s for s in each["sites"] if s not in known["sites"])]
        if _SEVERITIES.index(each["severity"]) > _SEVERITIES.index(known["severity"]):
            known.update(severity=each["severity"], message=each["message"])
    return dict(found)


def _finding(name: str, finding: Mapping[str, Any], has: str, lacks: str) -> Difference:
    words = (
        f"{has}'s check has {finding['code']} {finding['name']} ({finding['severity']}), {lacks}'s has not."
    )
    in_a = has == "A"
    places: tuple[Site, ...] = tuple((s, None) if in_a else (None, s) for s in finding["sites"]) or (
        ("", ""),
    )
    a, b = (finding["severity"], None) if in_a else (None, finding["severity"])
    return Difference(Part.VERDICT, name, places, a, b, words, (finding["message"],))


def _measurements(
    first: Sequence[Report], second: Sequence[Report], sites: Mapping[str, str]
) -> Iterator[Difference]:
    """Quantities that differ, one difference for all sites."""
    a, b = _values(first), _values(second)
    quantities: dict[str, list[tuple[Site, list[float], list[float]]]] = defaultdict(list)
    for (quantity, site), values in a.items():
        others = b.get((quantity, sites.get(site, site)))
        if others is not None and not quantity.startswith(_LEFT_OUT):
            quantities[quantity].append(((site, sites.get(site, site)), values, others))
    for quantity, places in quantities.items():
        apart = _apart(quantity, places)
        if apart:
            yield _measurement(quantity, apart)


def _values(reports: Sequence[Report]) -> dict[tuple[str, str], list[float]]:
    """(quantity, site) → its number in every report that has one."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for report in reports:
        for each in report.get("measurements", ()):
            number = _number(each["value"])
            if number is not None:
                found[each["quantity"], each["site"]].append(number)
        for name, value in (report.get("figures") or {}).items():
            number = _number(value)
            if number is not None and name in ("last_loss", "best_loss"):
                found[f"run/{name.replace('_', '-')}", ""].append(number)
    return found


def _number(value: Any) -> float | None:
    """A number; the words that stand for numbers that are not finite too."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


Places = list[tuple[Site, list[float], list[float]]]


def _apart(quantity: str, places: Places) -> Places:
    """The places at which a quantity differs."""
    if all(len(x) > 1 and len(y) > 1 for _, x, y in places):
        return [place for place in places if _welch(place[1], place[2])]
    factor = FACTORS.get(quantity.split("/")[0], _OTHER)
    ratios = [_ratio(_mean(x), _mean(y)) for _, x, y in places]
    middle = sorted(ratios)[(len(ratios) - 1) // 2]
    least = factor if middle >= factor else factor**2
    return [place for place, ratio in zip(places, ratios, strict=True) if ratio >= least]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio(x: float, y: float) -> float:
    """The larger over the smaller size; infinite where signs differ or only one is finite."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return 1.0 if math.isfinite(x) == math.isfinite(y) else math.inf
    if max(abs(x), abs(y)) < _TINY:
        return 1.0
    small, large = sorted((abs(x), abs(y)))
    return math.inf if small == 0 or x * y < 0 else large / small


def _welch(x: Sequence[float], y: Sequence[float]) -> bool:
    """Whether the means of two sets of replicas differ (Welch 1947), by more than `_LEAST`."""
    if not all(map(math.isfinite, (*x, *y))):
        return all(map(math.isfinite, x)) != all(map(math.isfinite, y))
    errors = [sum((v - _mean(each)) ** 2 for v in each) / (len(each) - 1) / len(each) for each in (x, y)]
    apart = abs(_mean(x) - _mean(y))
    return _ratio(_mean(x), _mean(y)) >= _LEAST and apart > _T * math.sqrt(sum(errors))


def _measurement(quantity: str, places: Places) -> Difference:
    a, b = [_mean(x) for _, x, _ in places], [_mean(y) for _, _, y in places]
    site = places[0][0][0] or "the whole model"
    where = f"at {len(places)} sites, first at {site}" if len(places) > 1 else f"at {site}"
    words = f"{quantity} is {a[0]:.3g} in A and {b[0]:.3g} in B, {where}."
    sites = tuple(place[0] for place in places)
    if len(places) == 1:
        return Difference(Part.VERDICT, "measurement", sites, a[0], b[0], words)
    return Difference(Part.VERDICT, "measurement", sites, a, b, words)
