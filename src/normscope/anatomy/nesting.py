"""Separate the sums of the stream from sums inside a branch and from sums around many blocks.

A sum inside another's branch is part of that branch: a Mamba mixer adds D·x, a convolution module its input.
Where the inner sums form a stream of their own, there are two cases, both reported in `unread`:

    the outer sums follow one another   they are the stream, the inner ones nested residuals (MobileBERT)
    an outer sum stands alone           it is a long skip around the inner ones (Funnel's decoder)
"""

from normscope.anatomy.blocks import pattern
from normscope.anatomy.gaps import module_of
from normscope.anatomy.graph import Gap
from normscope.anatomy.residual import Sum, without
from normscope.anatomy.streams import link, norms_on


def untangle(sums: list[Sum]) -> tuple[list[Sum], list[Gap]]:
    """The sums of the stream, and the gaps left out."""
    inner = _inner(sums)
    outer_of = {s: o for o, members in inner.items() for s in members}
    outers = {o for o in inner if _is_stream(inner[o], o)}
    chained = {o for o in outers if _is_chained(o, outers, sums)}
    around = [o for o in inner if o in outers - chained and o not in outer_of]
    dropped, nested = set(around), []
    for s, outer in outer_of.items():
        if outer not in dropped:
            dropped.add(s)
            nested += [outer] if outer in outers and outer not in nested else []
    unread: list[Gap] = []
    for outer in around:
        where, count = module_of(outer.op), len(inner[outer])
        words = f"a long skip is added in {where}: it passes around {count} residual sums"
        unread.append(Gap(words, outer.value))
    paths = list(dict.fromkeys(module_of(outer.op) for outer in nested))
    listed = ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")
    words = f"residual sums are nested in the branches that {listed} add: the inner ones are not read"
    unread += [Gap(words, outer.value) for outer in nested]
    return without(sums, dropped), unread


def _inner(sums: list[Sum]) -> dict[Sum, list[Sum]]:
    """Outer sum → the sums in its branches."""
    inner: dict[Sum, list[Sum]] = {}
    for total in sums:
        inside = [s for s in sums if total.skip.index < s.value.index < total.value.index]
        region = {v for term in total.terms for v in total.region(term)} if inside else set()
        if members := [s for s in inside if s.value in region]:
            inner[total] = members
    return inner


def _is_stream(members: list[Sum], outer: Sum) -> bool:
    """True for several adds, or one with norms; a single add without norms is a detail of a branch."""
    if len(members) == 1 and members[0].is_inside(outer):
        return False
    return len(members) > 1 or any(norms_on(v) for v in (members[0].skip, members[0].value))


def _is_chained(outer: Sum, outers: set[Sum], sums: list[Sum]) -> bool:
    """True where the sum before or after it is also an outer one, or is in the same layer."""
    alike = outers | {s for s in sums if pattern(s.op.call.path) == pattern(outer.op.call.path)}
    before = link(outer)
    if before.direct and before.before in alike:
        return True
    after = [link(s) for s in alike if s.value.index > outer.value.index]
    return any(each.direct and each.before is outer for each in after)
