"""Tested claims as pages: one self-contained HTML file, and Markdown for docs/."""

import datetime
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normscope.claims import words
from normscope.claims.kept import machine_words
from normscope.claims.plots import draw
from normscope.claims.result import ClaimResult
from normscope.claims.setup import Setup
from normscope.claims.sources import TEXTS, Text

if TYPE_CHECKING:
    from markupsafe import Markup

    from normscope.claims.plots import Plot


class Place(NamedTuple):
    """A place of a text, and the claims that are made there."""

    anchor: str
    where: str
    claims: list[str]


class Section(NamedTuple):
    """A text, the claims that stand under it, and those of others that it makes too."""

    text: Text
    places: list[Place]
    here: list[ClaimResult]
    also: list[ClaimResult]


def render_page(
    name: str, tested: Sequence[ClaimResult], setup: Setup, command: str = "", seconds: float = 0.0
) -> str:
    """A page of `tested` by one of the templates.

    - `claims.html`: a table of claims by source, each opening to what was measured, no script.
    - `claims.md`: how claims are judged, a table a text, then a section a claim.
    - `claims.zh.md`: the sources' own sentences, where they stand, the verdicts and the figures.
    - `table.md`: a table alone.

    Every word of a claim is escaped.
    """
    from normscope.report.page import environment

    layout: dict[str, Any] = {"keep_trailing_newline": True}
    if name.endswith(".md"):
        layout["finalize"] = _on_a_line
    templates = environment("normscope.claims", **layout)
    return templates.get_template(name).render(
        words=words,
        plots=_plots,
        kept=words.kept_beside,
        tested=tested,
        sections=sections(tested),
        signs=[(words.SIGNS[verdict], number) for verdict, number in words.counts(tested).items()],
        date=datetime.date.today().isoformat(),
        machine=machine_words(words.machine()),
        command=command,
        seeds=", ".join(map(str, setup.seeds)),
        long=setup.long,
        text=words.text_words(setup),
        spent=sum(each.seconds for each in tested),
        seconds=seconds,
        known=sum(each.cached for each in tested),
    )


def _on_a_line(value: object) -> "Markup":
    """The value for Markdown: on one line, with nothing in it that ends a cell or begins a tag."""
    from markupsafe import Markup

    line = " ".join(str(value).split()).replace("<", "&lt;").replace("|", "\\|")
    return value if isinstance(value, Markup) else Markup(line)


def sections(tested: Sequence[ClaimResult]) -> list[Section]:
    """A section for each text; a claim stands under the text of its first source."""
    found = []
    for text in TEXTS.values():
        saying = [each for each in tested if text.id in {source.text for source in each.claim.sources}]
        here = [each for each in saying if each.claim.sources[0].text == text.id]
        also = [each for each in saying if each.claim.sources[0].text != text.id]
        if saying:
            found.append(Section(text, _places(saying, text), here, also))
    return found


def _places(tested: Sequence[ClaimResult], text: Text) -> list[Place]:
    """Places where `text` makes these claims, in its order; each anchor once."""
    found: dict[str, Place] = {}
    sources = [(each.claim.id, source) for each in tested for source in each.claim.sources]
    for id, source in sources:
        if source.text == text.id:
            place = found.setdefault(source.anchor, Place(source.anchor, source.where, []))
            if id not in place.claims:
                place.claims.append(id)
    return sorted(found.values(), key=lambda place: _in_text(place.where))


def _in_text(where: str) -> tuple[bool, list[int], str]:
    """Sections and theorems by their numbers, equations after them."""
    return where.startswith("("), [int(number) for number in re.findall(r"\d+", where)], where


def _plots(tested: ClaimResult) -> "list[tuple[Plot, Markup]]":
    from markupsafe import Markup

    plots, name = tested.evidence.plots, tested.claim.id
    return [(plot, Markup(draw(plot, f"{name}-{number}"))) for number, plot in enumerate(plots)]
