"""Compare fresh weights: by role and depth, the laws that two initialisations draw from.

Each model is built at several seeds (`draws.py`). Parameters are put together by role (`roles.py`), so that
a fused weight is compared with its parts. A law differs when an effect is both large enough to matter and
beyond what the seeds explain. The criteria below were fixed before any case was tried, but for the margin of
the tails: a uniform law, which has many values at its ends, was once said to differ from itself.

    deviation   |log ratio| over `LEAST_RATIO`, and over `SIGMAS` standard errors
    mean        over `LEAST_MEAN` deviations, and over `SIGMAS` standard errors; constants exactly
    shape       kurtosis by `LEAST_KURTOSIS` and `SIGMAS` standard errors, or all largest values on one side
    zeros       another number of rows that are zero, which no continuous law draws
    orthogonal  rows or columns orthogonal in one of the two

The standard error of a log deviation from n values with kurtosis κ is √((κ − 1)/(4n)).

The rate of false differences: a test at 6 standard errors errs with probability 2·10⁻⁹. A model of 100
layers with 10 roles has 3,000 tests of a place and 30 of a role, so that of 10⁵ pairs of models of one law,
one is said to differ by chance (Bonferroni). For that to hold with few values, as in the bias of a head with
two outputs, errors are widened to the quantiles of Fisher's z and of Student's t at the same probability.
Layers that are copies of each other, as in `nn.TransformerEncoder`, count once.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.compare.draws import ORTHOGONAL, Draw, Start, law_of
from normscope.compare.outcome import Outcome
from normscope.compare.types import Compared, Difference, Pair, Part, Place

SIGMAS = 6.0
LEAST_RATIO = 0.02
LEAST_MEAN = 0.05
LEAST_KURTOSIS = 0.15
LEAST_TAIL = 1e-9
"""Probability that the largest values all come from one side by chance, under which the tails differ."""
_FEW = 30
"""Values that weigh as much as the guess that a law is normal."""
_NEAR = 0.1
"""Relative difference of two deviations that are said as one."""


@dataclass
class _Group:
    """Parameters of one role at one pair of places."""

    site: tuple[str | None, str | None]
    where: tuple[str, str]
    offsets: tuple[float, float]
    a: Draw
    b: Draw


def compare(a: Start, b: Start, rows: Pair) -> Outcome:
    """Differences between the laws of the fresh weights of two aligned models."""
    if a.is_fixed or b.is_fixed:
        who = " and of ".join(name for name, side in (("A", a), ("B", b)) if side.is_fixed)
        reason = f"the weights of {who} are the same at every seed: they are given, not drawn"
        return Outcome(Compared(Part.START, "not", (reason,)))
    groups: dict[tuple[str, str], list[_Group]] = {}
    for group in _groups(a, b, rows):
        groups.setdefault(group.where, []).append(group)
    each_role = [d for (kind, role), each in groups.items() for d in _differences(kind, role, each)]
    found = _merged(each_role)
    seeds = min(a.seeds, b.seeds)
    figures = {"roles": len(groups), "seeds": seeds, "places": sum(map(len, groups.values()))}
    if not groups:
        return Outcome(Compared(Part.START, "not", ("A and B have no parameters of the same role",)))
    said = "" if found else f"the same laws of {len(groups)} roles at {seeds} seeds"
    return Outcome(Compared(Part.START, "whole", (), said, figures), tuple(found))


def _groups(a: Start, b: Start, rows: Pair) -> Iterator[_Group]:
    """Parameters by role, at every pair of places."""
    embeddings = [
        {name for stack in place.parts for name in stack.facts.get("parameters", {})} if place else set()
        for place in (rows.a, rows.b)
    ]
    for pair in _pairs(rows):
        x, y = pair.a, pair.b
        if x is None or y is None:
            continue
        tied = embeddings if x.level == "model" else [set[str](), set[str]()]
        known = [
            {n: r for n, r in place.facts.get("parameters", {}).items() if n in side.draws and n not in skip}
            for place, side, skip in zip((x, y), (a, b), tied, strict=True)
        ]
        for roles in _components(known[0].values(), known[1].values()):
            names = [[n for n, r in each.items() if roles & set(r)] for each in known]
            if not names[0] or not names[1]:
                continue
            draws = [_sum([side.draws[n] for n in each]) for side, each in zip((a, b), names, strict=True)]
            role = _role(roles)
            offsets = tuple(_offset(place, role) for place in (x, y))
            yield _Group((x.name, y.name), (_kind(x), role), offsets, *draws)  # type: ignore[arg-type]


def _pairs(rows: Pair) -> Iterator[Pair]:
    """Stacks' own places before their branches, the model's at the end, as in the forward."""
    for stack in rows.parts:
        yield stack
        for block in stack.parts:
            yield from block.parts
    yield rows


def _kind(place: Place) -> str:
    return str(place.facts.get("kind", place.level))


def _components(a: Iterable[Sequence[str]], b: Iterable[Sequence[str]]) -> list[frozenset[str]]:
    """Roles that must be compared together, because a parameter of one side makes several of them."""
    found: list[set[str]] = []
    for roles in (*a, *b):
        joined = set(roles)
        apart = []
        for each in found:
            if each & joined:
                joined |= each
            else:
                apart.append(each)
        found = [*apart, joined]
    return [frozenset(each) for each in found]


_ORDER = ("q", "k", "v", "o", "gate", "up", "down", "bias of", "gain of")


def _role(roles: Iterable[str]) -> str:
    """The roles in words: "q, k, v"."""
    ordered = sorted(roles, key=lambda role: (next((i for i, o in enumerate(_ORDER) if role == o), 99), role))
    if len(ordered) > 1 and all(role.startswith("bias of ") for role in ordered):
        return "bias of " + ", ".join(role.removeprefix("bias of ") for role in ordered)
    return ", ".join(ordered)


def _offset(place: Place, role: str) -> float:
    """1 where the gains of a norm are kept as 1 + w."""
    if not role.startswith("gain of"):
        return 0.0
    fact = "final_norm_offset" if place.level == "stack" else "norm_offset"
    value = place.facts.get(fact, 0.0)
    return value if isinstance(value, float) else 0.0


def _sum(draws: Sequence[Draw]) -> Draw:
    total = draws[0]
    for each in draws[1:]:
        total = total + each
    return total


def _differences(kind: str, role: str, groups: Sequence[_Group]) -> list[Difference]:
    """Differences of one role over all its places."""
    what = (
        f"the fresh weights of {role}"
        if kind in ("model", "stack")
        else f"the {kind}'s fresh {_plural(role)}"
    )
    laws, means, scales, zeros = [], [], [], []
    pooled = _shape_differs([g.a for g in groups], [g.b for g in groups])
    for group in groups:
        if group.a.is_constant != group.b.is_constant or _orthogonality_differs(group.a, group.b):
            laws.append(group)
        elif group.a.is_constant or _mean_differs(group):
            if abs(group.a.mean + group.offsets[0] - group.b.mean - group.offsets[1]) > 1e-6:
                means.append(group)
        elif group.a.zero_rows != group.b.zero_rows and group.a.number == group.b.number:
            zeros.append(group)
        elif pooled:
            laws.append(group)
    apart = set(map(id, (*laws, *means)))
    rest = [group for group in groups if id(group) not in apart or pooled]
    scales = _scales_apart([g for g in rest if not (g.a.is_constant or g.b.is_constant)])
    found = []
    if laws:
        found.append(_difference("init-law", laws, law_of, f"The law of {what} is"))
    if means:
        found.append(_difference("init-mean", means, _mean_of, f"The mean of {what} is"))
    if zeros:
        rows = f"The number of rows of zeros in {what} is"
        found.append(_difference("init-zeros", zeros, lambda draw: draw.zero_rows, rows))
    if scales:
        name = "init-scale" if _is_one_ratio(scales) else "init-depth"
        said = f"The standard deviation of {what} is"
        found.append(_difference(name, scales, lambda draw: draw.deviation, said))
    return found


def _merged(found: Sequence[Difference]) -> list[Difference]:
    """The differences, those of several roles with the same values as one."""
    merged: list[list[Difference]] = []
    for each in found:
        like = next((group for group in merged if _is_like(group[0], each)), None)
        if like is None:
            merged.append([each])
        else:
            like.append(each)
    return [group[0] if len(group) == 1 else _as_one(group) for group in merged]


def _is_like(a: Difference, b: Difference) -> bool:
    return a.name == b.name and all(_is_near(x, y) for x, y in ((a.a, b.a), (a.b, b.b)))


def _is_near(x: Any, y: Any) -> bool:
    if isinstance(x, list) or isinstance(y, list):
        return isinstance(x, list) and isinstance(y, list) and len(x) == len(y) and all(map(_is_near, x, y))
    if isinstance(x, float) and isinstance(y, float):
        return abs(x - y) <= _NEAR * max(abs(x), abs(y))
    return bool(x == y)


def _as_one(group: Sequence[Difference]) -> Difference:
    """One difference for several roles: its message names them all."""
    first = group[0]
    beginning, _, end = first.message.partition(" is ")
    what = beginning.split(" of ")[0]
    roles = list(dict.fromkeys(each.message.partition(" is ")[0].partition(" of ")[2] for each in group))
    listed = "; ".join([roles[0], *(role.removeprefix("the ") for role in roles[1:])])
    sites = tuple(dict.fromkeys(site for each in group for site in each.sites))
    evidence = tuple(dict.fromkeys(line for each in group for line in each.evidence))
    message = f"{what} of {listed} is {end}"
    return dataclasses.replace(first, sites=sites, message=message, evidence=evidence)


def _plural(role: str) -> str:
    return role if role.startswith(("bias", "gain", "scale")) else f"weights of {role}"


def _mean_of(draw: Draw) -> float:
    return draw.mean


def _orthogonality_differs(a: Draw, b: Draw) -> bool:
    if a.spread is None or b.spread is None:
        return False
    return (a.spread < ORTHOGONAL) != (b.spread < ORTHOGONAL)


def _mean_differs(group: _Group) -> bool:
    a, b = group.a, group.b
    apart = abs(a.mean + group.offsets[0] - b.mean - group.offsets[1])
    error = math.hypot(a.deviation / math.sqrt(a.number), b.deviation / math.sqrt(b.number))
    margin = _student(min(a.number, b.number) - 1) * error
    return apart > max(LEAST_MEAN * max(a.deviation, b.deviation), margin)


def _student(freedom: float) -> float:
    """Quantile of Student's t at the probability of `SIGMAS` (Gaver and Kafadar 1984)."""
    if freedom <= 1.5:
        return math.inf
    power = SIGMAS**2 * (freedom - 1.5) / (freedom - 1) ** 2
    return math.sqrt(freedom * math.expm1(power)) if power < 100 else math.inf


def _shape_differs(a: Sequence[Draw], b: Sequence[Draw]) -> bool:
    """Whether the values over their deviation have another law, over all places together."""
    a = [draw for draw in _distinct(a) if draw.deviation]
    b = [draw for draw in _distinct(b) if draw.deviation]
    if not a or not b:
        return False
    numbers = [sum(draw.number for draw in each) for each in (a, b)]
    kurtosis = [
        sum(draw.kurtosis * draw.number for draw in each) / n for each, n in zip((a, b), numbers, strict=True)
    ]
    error = math.sqrt(24 / numbers[0] + 24 / numbers[1]) * max(1.0, max(kurtosis) / 3) ** 3
    if abs(kurtosis[0] - kurtosis[1]) > max(LEAST_KURTOSIS, SIGMAS * error):
        return True
    tails = [torch.cat([(d.sample - d.mean).abs() / d.deviation for d in each]) for each in (a, b)]
    return _one_tail(tails[0], tails[1], margin=1 + SIGMAS * max(_log_error(draw) for draw in (*a, *b)))


def _one_tail(a: Tensor, b: Tensor, margin: float) -> bool:
    """Whether the largest values all come from one side, too often for chance.

    `margin` is for the error of the deviations: uniform laws have many values at their ends.
    """
    for x, y in ((a, b), (b, a)):
        beyond = int((x > margin * y.max()).sum())
        share = len(x) / (len(x) + len(y))
        if beyond * math.log(share) < math.log(LEAST_TAIL):
            return True
    return False


def _distinct(draws: Iterable[Draw]) -> list[Draw]:
    """The draws without copies of others, which are no further evidence."""
    return list({draw.sums: draw for draw in draws}.values())


def _log_ratio(group: _Group) -> tuple[float, float]:
    """Logarithm of B's deviation over A's, and its standard error."""
    return math.log(group.b.deviation / group.a.deviation), _ratio_error(group.a, group.b)


def _ratio_error(a: Draw, b: Draw) -> float:
    """Standard error of the logarithm of a ratio of deviations.

    With few values it is wider than √(1/(2ν) + 1/(2ν')), so that `SIGMAS` of it are a quantile of Fisher's z
    (Carter 1947; Abramowitz and Stegun 26.6.16).
    """
    one, two = (max(_freedom(draw) - 1, 1e-3) for draw in (a, b))
    h, more = 2 / (1 / one + 1 / two), (SIGMAS**2 - 3) / 6
    skew = abs(1 / one - 1 / two) * max(more + 5 / 6 - 2 / (3 * h), 0.0)
    return math.sqrt(h + more) / h + skew / SIGMAS


def _freedom(draw: Draw) -> float:
    """Degrees of freedom ν of the deviation: the variance of its logarithm is 1/(2ν).

    Few values say little of their kurtosis, so that it is drawn towards 3.
    """
    kurtosis = (draw.number * draw.kurtosis + _FEW * 3) / (draw.number + _FEW)
    return 2 * draw.number / max(kurtosis - 1, 0.2) - 1


def _log_error(draw: Draw) -> float:
    """Standard error of the logarithm of a deviation."""
    return 1 / math.sqrt(2 * max(_freedom(draw), 1e-3))


def _scales_apart(groups: Sequence[_Group]) -> list[_Group]:
    """The places whose deviation differs: all where one ratio holds everywhere, else each by itself."""
    if not groups:
        return []
    ratios = [_log_ratio(group) for group in groups]
    weights = [1 / error**2 for _, error in ratios]
    mean = sum(r * w for (r, _), w in zip(ratios, weights, strict=True)) / sum(weights)
    error = _ratio_error(*(_sum(_distinct(side)) for side in zip(*((g.a, g.b) for g in groups), strict=True)))
    alike = all(abs(r - mean) < max(SIGMAS * e, LEAST_RATIO) for r, e in ratios)
    if alike:
        return list(groups) if abs(mean) > max(LEAST_RATIO, SIGMAS * error) else []
    return [g for g, (r, e) in zip(groups, ratios, strict=True) if abs(r) > max(LEAST_RATIO, SIGMAS * e)]


def _is_one_ratio(groups: Sequence[_Group]) -> bool:
    ratios = [_log_ratio(group) for group in groups]
    middle = sorted(r for r, _ in ratios)[len(ratios) // 2]
    return all(abs(r - middle) < max(SIGMAS * e, 2 * LEAST_RATIO) for r, e in ratios)


def _difference(
    name: str, groups: Sequence[_Group], value: Callable[[Draw], Any], beginning: str
) -> Difference:
    values = [[value(draw) for draw in side] for side in ([g.a for g in groups], [g.b for g in groups])]
    a, b = (_common(each) for each in values)
    evidence = [
        f"Each side's values: {sum(g.a.number for g in groups)} and {sum(g.b.number for g in groups)}."
    ]
    if name in ("init-scale", "init-depth"):
        ratios = [_log_ratio(group) for group in groups]
        words = ", ".join(f"{math.exp(r):.3g} ± {e:.1g}" for r, e in ratios[:8])
        evidence.append(f"B's deviation over A's, with its standard error, place by place: {words}.")
    message = f"{beginning} {_in_words(a)} in A and {_in_words(b)} in B."
    return Difference(Part.START, name, tuple(g.site for g in groups), a, b, message, tuple(evidence))


def _common(values: Sequence[Any]) -> Any:
    """One value where all are nearly one, else the list of them."""
    if all(isinstance(v, float) for v in values):
        low, high = min(values), max(values)
        middle = sum(values) / len(values)
        return middle if high - low <= 0.1 * max(abs(low), abs(high)) else list(values)
    return values[0] if all(v == values[0] for v in values) else list(values)


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        ends = [*value[:3], value[-1]] if len(value) > 4 else value
        return ", ".join(map(_in_words, ends[:3])) + (f", …, {_in_words(ends[3])}" if len(value) > 4 else "")
    return f"{value:.3g}" if isinstance(value, float) else str(value)
