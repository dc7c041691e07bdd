"""The page of the claims, one self-contained HTML file."""

import datetime
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from normscope.claims.judge import Judgement, Verdict
from normscope.claims.kept import kept_long, machine_words
from normscope.claims.plots import draw
from normscope.claims.result import ClaimResult
from normscope.claims.setup import Setup
from normscope.claims.sources import TEXTS, Text
from normscope.claims.words import (
    counter_words,
    counts,
    effects_words,
    figure_words,
    kept_words,
    machine,
    shaky_words,
    tally,
    text_words,
    verdict_words,
)

if TYPE_CHECKING:
    from markupsafe import Markup

    from normscope.claims.plots import Plot


class Sign(NamedTuple):
    """Look of a verdict: a class of the style sheet, a mark beside the colour, a short name."""

    name: str
    mark: str
    short: str


SIGNS = {
    Verdict.HOLDS: Sign("holds", "✓", "holds"),
    Verdict.CONDITION: Sign("condition", "◐", "under our condition"),
    Verdict.REFUTED: Sign("refuted", "✗", "refuted"),
    Verdict.UNDECIDED: Sign("undecided", "?", "undecided"),
    Verdict.NOT_MEASURED: Sign("unmeasured", "–", "not measured"),
}


class VerdictView(NamedTuple):
    """A verdict in words: `word` stands out, `rest` is its condition, `shaky` on how many seeds."""

    sign: Sign
    word: str
    rest: str
    shaky: str
    agree: str
    counter: str


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


def render_page(tested: Sequence[ClaimResult], setup: Setup, command: str, seconds: float) -> str:
    """The page: a table of claims by source, each opening to what was measured.

    Every word in it is escaped; it runs no script and loads nothing.
    """
    from jinja2 import Environment, StrictUndefined

    source = (files("normscope.claims") / "templates" / "claims.html").read_text(encoding="utf-8")
    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(autoescape=True, undefined=StrictUndefined, **layout)
    numbers = counts(tested)
    return environment.from_string(source).render(
        sections=sections(tested),
        lead=tally(tested),
        signs=[(SIGNS[verdict], numbers[verdict]) for verdict in Verdict],
        total=len(tested),
        facts=_facts(tested, setup, command, seconds),
        long=setup.long,
        view=verdict_view,
        figure=figure_words,
        plots=_plots,
        kept=lambda each: None if each.long else kept_long(each.claim),
        kept_words=kept_words,
        effects=effects_words,
    )


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


def verdict_view(judgement: Judgement, of: str) -> VerdictView:
    """A verdict for the page."""
    word, shaky = str(judgement.verdict), shaky_words(judgement)
    rest = verdict_words(judgement, of).removesuffix(f" ({shaky})").removeprefix(word)
    agree = f"{judgement.held} of {judgement.cases} cases agree"
    return VerdictView(SIGNS[judgement.verdict], word, rest, shaky, agree, counter_words(judgement))


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


def _facts(
    tested: Sequence[ClaimResult], setup: Setup, command: str, seconds: float
) -> Iterator[tuple[str, str]]:
    yield "measured", f"{datetime.date.today().isoformat()} on {machine_words(machine())}"
    yield "command", command
    yield "seeds", ", ".join(map(str, setup.seeds)) + (", the long form" if setup.long else "")
    yield "trained on", text_words(setup)
    spent = sum(each.seconds for each in tested)
    known = sum(each.cached for each in tested)
    before = f", with {known} of {len(tested)} claims kept from before" if known else ""
    yield "time", f"{spent:.0f} s of measuring; this run took {seconds:.0f} s{before}"


def _plots(tested: ClaimResult) -> "list[tuple[Plot, Markup]]":
    from markupsafe import Markup

    plots, name = tested.evidence.plots, tested.claim.id
    return [(plot, Markup(draw(plot, f"{name}-{number}"))) for number, plot in enumerate(plots)]
