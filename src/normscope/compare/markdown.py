"""The comparison as a few lines of Markdown, for a pull request or a job's summary.

Whatever comes from the models is escaped by `normscope.report.markdown`.
"""

from collections.abc import Iterator

from normscope.compare.places import Rows, sites_of
from normscope.compare.types import Diff, Difference, Part
from normscope.compare.words import (
    clean,
    confirmed,
    first_parting,
    headline,
    in_order,
    not_compared,
    reason,
    result,
    says_values_only,
    values,
)
from normscope.report.html import sentence
from normscope.report.markdown import block, code, text

MOST = 8
"""Differences of a part that are listed."""
MOST_LINES = 28
"""Lines of all differences."""


def render_markdown(diff: Diff, command: str | None = None) -> str:
    """Verdict, differences by part, how far each part was compared; 60 lines at most.

    Args:
        diff: the comparison.
        command: the shell command that made it, shown as the way to run it again.
    """
    return "\n".join(_lines(clean(diff), command)) + "\n"


def _lines(diff: Diff, command: str | None) -> Iterator[str]:
    yield f"### normscope diff: {headline(diff).lower()}"
    yield ""
    yield text(sentence(reason(diff)))
    yield ""
    yield f"A: {code(diff.a)}, B: {code(diff.b)}"
    yield ""
    yield "| part | result |"
    yield "|---|---|"
    for each in diff.parts:
        yield f"| {each.part} | {text(result(diff, each))} |"
    if diff.differences:
        yield ""
        yield from _differences(diff)
    if gaps := not_compared(diff):
        yield ""
        for names, why in gaps:
            yield f"- {', '.join(names)} {text(why)}"
    if command is not None:
        yield ""
        yield from block(command)


def _differences(diff: Diff) -> Iterator[str]:
    """The first parting, then the others by part; parts that do not fit are counted."""
    room = MOST_LINES
    for part in sorted((each.part for each in diff.parts), key=lambda part: part is not Part.FUNCTION):
        found = in_order(diff, part)
        shown = found[: min(MOST, room)]
        room -= len(shown)
        for each in shown:
            yield _difference(diff, each)
        if (more := len(found) - len(shown)) > 0:
            yield f"- **{part}**: {more} more"


def _difference(diff: Diff, each: Difference) -> str:
    """One item of the list; the message of the first parting stands in the verdict."""
    is_first = each is first_parting(diff)
    place, sites = text(Rows(diff.rows).fold(each)), text(sites_of(each))
    where = f"{place} ({sites})" if is_first and sites != place else place
    shown = values(each)
    words = [] if shown is None else [f"A {code(shown[0])}, B {code(shown[1])}."]
    if not is_first and not says_values_only(each):
        words.append(text(each.message))
    name = f"{code(each.name)} ({confirmed(each)})" if confirmed(each) else code(each.name)
    return " ".join([f"- **{each.part}** {name} at {where}:", *words]).rstrip(":")
