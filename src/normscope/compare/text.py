"""The comparison on a terminal: verdict, first parting, differences by part, what was not compared.

Whatever comes from a model (names, values, reasons) goes through `Text`: "[red]" in a path stays text.
"""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from normscope.compare.places import Rows, sites_of
from normscope.compare.types import Compared, Diff, Difference, Part
from normscope.compare.words import (
    clean,
    confirmed,
    first_parting,
    headline,
    in_order,
    listed,
    not_compared,
    outcome,
    reason,
    result,
    says_values_only,
    values,
)
from normscope.report.console import as_text, indented, labelled, show
from normscope.report.words import cost_in_words

MOST = 12
"""Differences of a part that are listed."""
COLOURS = {"same": "bold green", "different": "bold red", "not compared": "bold cyan"}


def print_diff(diff: Diff, console: Console | None = None) -> None:
    """Print `diff`; colour and width are the terminal's, plain text in a pipe."""
    show(lambda width: _parts(clean(diff), width), console)


def render_text(diff: Diff, width: int = 110) -> str:
    """The same as plain text of `width` columns."""
    return as_text(lambda columns: _parts(clean(diff), columns), width)


def _parts(diff: Diff, width: int) -> Iterator[RenderableType]:
    yield Text.assemble((f"{headline(diff)}:", COLOURS[outcome(diff)]), " ", reason(diff))
    yield labelled("A", diff.a)
    yield labelled("B", diff.b)
    for each in sorted(diff.parts, key=lambda each: each.part is not Part.FUNCTION):  # the others in order
        if diff.of(each.part):
            yield from _part(diff, each, width)
    yield from _rest(diff)


def _part(diff: Diff, part: Compared, width: int) -> Iterator[RenderableType]:
    found = in_order(diff, part.part)
    yield Text("")
    yield Text.assemble((str(part.part), "bold"), "  ", result(diff, part))
    for each in found[:MOST]:
        yield from _difference(diff, each, width)
    if (more := len(found) - MOST) > 0:
        yield indented(Text(f"and {more} more; --format json lists all", style="dim"), 2)


def _difference(diff: Diff, each: Difference, width: int) -> Iterator[RenderableType]:
    """Name, place and values; then the message, which for the first parting stands in the verdict."""
    is_first = each is first_parting(diff)
    place, shown = Rows(diff.rows).fold(each), values(each)
    tried = f" ({words})" if (words := confirmed(each)) else ""
    first = ("first: " if is_first else "", "bold red")
    head = Text.assemble(first, (each.name, "bold yellow"), tried, "  ", place)
    beside = "" if shown is None else f"  A {shown[0]} · B {shown[1]}"
    if shown is not None and cell_len(head.plain + beside) + 2 <= width:
        yield indented(Text.assemble(head, "  ", *_value("A", shown[0]), " · ", *_value("B", shown[1])), 2)
    else:
        yield indented(head, 2)
        for side, value in zip("AB", shown or (), strict=False):
            yield indented(Text.assemble(*_value(side, value)))
    if not is_first and not says_values_only(each):
        yield indented(Text(each.message))
    elif is_first and place != (sites := sites_of(each)):
        yield indented(Text(f"at {sites}", style="dim"))
    for words in each.evidence if each.part is Part.FUNCTION else ():
        yield indented(Text(words, style="dim"))


def _value(side: str, value: str) -> tuple[tuple[str, str], str, str]:
    return (side, "bold"), " ", value


def _rest(diff: Diff) -> Iterator[RenderableType]:
    """Parts without a difference, parts that were not compared, notes, cost."""
    yield Text("")
    for each in diff.parts:
        if each.how == "whole" and not diff.of(each.part):
            yield _line(str(each.part), result(diff, each))
    for names, why in not_compared(diff):
        yield _line(names[0], why) if len(names) == 1 else Text(f"{listed(names)}: {why}")
    for note in diff.notes:
        yield _line("note", note)
    if diff.cost:
        yield _line("cost", cost_in_words(diff.cost))


def _line(label: str, words: str) -> RenderableType:
    return labelled(label, words, 11)
