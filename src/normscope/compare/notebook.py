"""The comparison in a notebook cell: verdict, differences, and what was not compared."""

from normscope.compare.places import Rows
from normscope.compare.types import Diff, Difference
from normscope.compare.words import (
    clean,
    confirmed,
    headline,
    in_order,
    listed,
    not_compared,
    outcome,
    reason,
    says_values_only,
    values,
)
from normscope.notebook import Html, badge, code, fragment, line, table, tag
from normscope.report.html import sentence

MOST = 12
"""Differences of a part that are listed."""
_TONES = {"same": "fine", "different": "error", "not compared": "note"}
_COLUMNS = ("difference", "place", "A", "B", "")


def diff_html(diff: Diff) -> str:
    """The comparison without its page: `diff.to_html(path)` writes that one."""
    diff = clean(diff)
    parts = [(each.part, in_order(diff, each.part)) for each in diff.parts if diff.of(each.part)]
    return fragment(
        line(badge(headline(diff), _TONES[outcome(diff)]), " ", code(diff.a), " · ", code(diff.b)),
        line(sentence(reason(diff))),
        *(
            table(
                (_cells(diff, each) for each in found[:MOST]),
                _COLUMNS,
                title=f"{part}: {len(found)} difference{'s' if len(found) > 1 else ''}"
                + (f", the first {MOST}" if len(found) > MOST else ""),
            )
            for part, found in parts
        ),
        *(line(f"{listed(names)}: {why}", soft=True) for names, why in not_compared(diff)),
        *(line(note, soft=True) for note in diff.notes),
    )


def _cells(diff: Diff, each: Difference) -> tuple[str, ...]:
    name = [tag("b", each.name)]
    name += [tag("div", confirmed(each), style="opacity:.7")] if confirmed(each) else []
    shown = values(each) or ("", "")
    words = "" if says_values_only(each) else each.message
    return Html("".join(name)), Rows(diff.rows).fold(each), *(code(value) for value in shown), words
