"""Keep the sums of the stream apart from sums inside a branch and from sums around many blocks.

A sum inside another's branch is part of that branch: a Mamba mixer adds D·x, a convolution module its input.
When the inner sums form a stream of their own, there are two cases, and `unread` names both:

    the outer sums follow one another   they are the stream, the inner ones nested residuals (MobileBERT)
    an outer sum stands alone           it is a long skip around the inner ones (Funnel's decoder)
"""

from dataclasses import dataclass, field

from normscope.anatomy.blocks import pattern
from normscope.anatomy.graph import Gap, Value
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import link, norms_on


@dataclass
class Stream:
    """The sums to read, and what was left out, in words."""

    sums: list[Sum]
    unread: list[Gap] = field(default_factory=list)


def untangle(sums: list[Sum], norms: dict[Value, FoundNorm]) -> Stream:
    """Choose the sums of the stream."""
    inner = _inner(sums)
    outer_of = {s: o for o, members in inner.items() for s in members}
    outers = {o for o in inner if _is_stream(inner[o], norms)}
    chained = {o for o in outers if _is_chained(o, outers, sums, norms)}
    unread: list[Gap] = []
    dropped: set[Sum] = set()
    for outer, members in inner.items():
        if outer in outers and outer not in chained and outer not in outer_of:
            dropped.add(outer)
            words = f"a long skip is added in {_where(outer)}: it passes around {len(members)} residual sums"
            unread.append(Gap(words, outer.value))
    nested: list[Sum] = []
    for s, outer in outer_of.items():
        if outer in dropped:
            continue
        dropped.add(s)
        if outer in outers:
            nested.append(outer)
    places = _listed(list(dict.fromkeys(map(_where, nested))))
    words = f"residual sums are nested in the branches that {places} add: what lies inside is not read"
    unread += [Gap(words, outer.value) for outer in dict.fromkeys(nested)]
    return Stream([s for s in sums if s not in dropped], unread)


def _inner(sums: list[Sum]) -> dict[Sum, list[Sum]]:
    """Outer sum → the sums in its branches."""
    inner: dict[Sum, list[Sum]] = {}
    for total in sums:
        inside = [s for s in sums if total.skip.index < s.value.index < total.value.index]
        if not inside:
            continue
        region = {v for term in total.branches for v in total.region(term)}
        members = [s for s in inside if s.value in region]
        if members:
            inner[total] = members
    return inner


def _is_stream(members: list[Sum], norms: dict[Value, FoundNorm]) -> bool:
    """One add without norms is a detail of a branch; several, or a normed one, are a stream of their own."""
    return len(members) > 1 or any(norms_on(v, norms) for v in (members[0].skip, members[0].value))


def _is_chained(outer: Sum, outers: set[Sum], sums: list[Sum], norms: dict[Value, FoundNorm]) -> bool:
    """Whether a sum right before or after it is an outer one, too, or stands in the same layer."""
    by_value = {s.value: s for s in sums}
    alike = outers | {s for s in sums if pattern(s.op.call.path) == pattern(outer.op.call.path)}
    before = link(outer, by_value, norms)
    if before.direct and before.before in alike:
        return True
    after = [link(s, by_value, norms) for s in alike if s.value.index > outer.value.index]
    return any(each.direct and each.before is outer for each in after)


def _where(total: Sum) -> str:
    return total.op.call.path or "the root module"


def _listed(places: list[str]) -> str:
    return ", ".join(places[:2]) + (f" and {len(places) - 2} more" if len(places) > 2 else "")
