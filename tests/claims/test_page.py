"""The page: every verdict, every place, nothing that runs or loads, and pictures of what was measured."""

import math
import re
from html.parser import HTMLParser

import pytest

from normscope.claims import Claim, Line, Plot, Setup, measure_claim
from normscope.claims.page import render_page, sections
from normscope.claims.plots import draw, drawable
from normscope.claims.result import ClaimResult as Outcome

TWO = Setup(seeds=(0, 1))
COMMAND = "normscope claims 'a <b>' --format html"


@pytest.fixture
def tested(odd: dict[str, Claim]) -> list[Outcome]:
    return [measure_claim(odd[id], TWO) for id in ("Z1", "Z2", "Z3", "Z4", "Z5", "Z8")]


@pytest.fixture
def page(tested: list[Outcome]) -> str:
    return render_page("claims.html", tested, TWO, COMMAND, 12.0)


class Tags(HTMLParser):
    """Tags with their attributes, and whether each that is opened is closed."""

    VOID = ("meta", "input", "link", "br", "img", "use", "path")
    LEFT_OPEN = ("html", "head", "body")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID and tag not in self.LEFT_OPEN:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and tag not in self.LEFT_OPEN:
            assert self.open.pop() == tag


def test_it_runs_no_script_and_loads_nothing(page: str) -> None:
    tags = Tags(page).tags
    assert not {"script", "link", "iframe", "object", "img"} & {tag for tag, _ in tags}
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), tag
    policy = dict(tags[[tag for tag, _ in tags].index("meta") + 2][1])
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'")


def test_what_is_written_in_a_claim_is_text(page: str) -> None:
    for words in ("<b>of", "<b>every", "<b>'", "<script>", "<i>", "<error>", "<here>", "<on purpose>"):
        assert words not in page, words
    assert "零空间 &lt;b&gt;" in page
    assert "&#39;a &lt;b&gt;&#39;" in page


def test_every_id_is_there_once_and_every_link_leads_to_one(page: str) -> None:
    parsed = Tags(page)
    assert parsed.open == []
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [
        (attributes.get("href") or attributes.get("xlink:href") or "")[1:]
        for _, attributes in parsed.tags
        if attributes.get("href") or attributes.get("xlink:href")
    ]
    assert set(targets) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)
    assert {"Z1", "Z2", "Z3", "Z4", "Z5", "Z8", "000-theorem-2-2", "004-5-3-2"} <= set(ids)
    labels = [attributes["for"] for tag, attributes in parsed.tags if tag == "label"]
    assert set(labels) <= set(ids)


def test_a_claim_stands_under_its_first_text_and_is_linked_from_the_others(tested: list[Outcome]) -> None:
    first, last = sections(tested)
    assert (first.text.id, last.text.id) == ("000", "004")
    assert [each.claim.id for each in first.here] == ["Z1", "Z2"]
    assert [each.claim.id for each in first.also] == ["Z3"]
    assert [each.claim.id for each in last.here] == ["Z3", "Z4", "Z5", "Z8"]
    assert [each.claim.id for each in last.also] == ["Z1"]
    assert [(place.where, place.claims) for place in first.places] == [("Theorem 2.2", ["Z1", "Z2", "Z3"])]


@pytest.mark.parametrize(
    ("id", "sign", "words"),
    [
        ("Z1", "is-holds", "✓</i> holds"),
        ("Z2", "is-condition", "◐</i> holds under our condition</b>: x &lt; 1; met in 2 of 4 real blocks"),
        ("Z3", "is-undecided", "?</i> undecided</b> <em>seeds disagree: 1 × refuted, 1 × holds</em>"),
        ("Z4", "is-unmeasured", "needs a GPU &lt;here&gt;"),
        ("Z5", "is-unmeasured", "RuntimeError: broken &lt;on purpose&gt;"),
        ("Z8", "is-refuted", "size: -inf"),
    ],
)
def test_a_row_says_its_verdict_in_words_and_by_a_mark(id: str, sign: str, words: str, page: str) -> None:
    row = re.search(rf'<details class="claim ([\w-]+)" id="{id}">(.*?)</summary>', page, re.DOTALL)
    assert row is not None
    assert row[1] == sign
    assert words in row[2]


def test_a_row_opens_to_what_was_measured(page: str) -> None:
    body = page.partition('id="Z2-open"')[2].partition('<details class="claim')[0]
    for words in (
        *("half of it", "counter-example", "d = 0, x &lt; 1", "2 of 4 cases agree", "Nobody looked."),
        *(
            "A note &lt;b&gt;of&lt;/b&gt; 3.14.",
            "On a GPU: there is none.",
            "def it_holds_sometimes(setup: Setup)",
        ),
    ):
        assert words in body, words
    assert body.count("<svg") == 2
    assert page.partition('id="Z3-open"')[2].count("Judged seed by seed; the seeds must agree") == 1


def test_the_head_says_the_tally_the_command_and_the_seeds(page: str) -> None:
    assert (
        "6 claims: 1 holds, 1 holds under our condition, 1 is refuted, 1 is undecided, 2 are not measured"
        in page
    )
    for verdict in (
        "✓</i> holds 1",
        "◐</i> under our condition 1",
        "✗</i> refuted 1",
        "?</i> undecided 1",
        "–</i> not measured 2",
    ):
        assert verdict in page


def test_a_page_of_nothing_is_a_page() -> None:
    assert "no claim was tested" in render_page("claims.html", [], TWO, COMMAND, 0.1)


def test_points_that_cannot_be_drawn_are_left_out() -> None:
    line = Line(
        "", [0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 5.0, math.nan], [0.0, 0.0, 4.0, 0.0], [9.0, 9.0, math.inf, 9.0]
    )
    assert drawable(line, "") == [(0.0, 1.0, 0.0, 9.0), (1.0, 0.0, 0.0, 9.0), (2.0, 5.0, 4.0, 5.0)]
    assert drawable(line, "xy") == [(2.0, 5.0, 4.0, 5.0)]
    assert drawable(Line("", [1.0], [2.0]), "") == [(1.0, 2.0, 2.0, 2.0)]


def test_a_plot_has_its_text_as_text_and_ids_of_its_own() -> None:
    lines = [
        Line("first & <second>", [1.0, 2.0], [3.0, 4.0], [2.0, 3.0], [5.0, 6.0]),
        Line("dots", [1.0], [1.0], marks=True),
    ]
    plot = Plot("A <title>", "depth", "size", lines, "x", {"even": 2.0})
    svg = draw(plot, "A7-0")
    assert svg.startswith("<svg")
    for words in ("first &amp; &lt;second&gt;", "dots", "even", "depth", "size"):
        assert f">{words}</text>" in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    assert ids
    assert all(id.startswith("A7-0-") for id in ids)
    assert draw(plot, "A7-0") == svg
    assert "<style" not in svg
    assert len(svg) < 20_000


def test_more_lines_than_colours_can_be_drawn() -> None:
    lines = [Line(f"line {number}", [1.0, 10.0], [number + 1.0, 2.0]) for number in range(12)]
    assert "line 11" in draw(Plot("many", "x", "y", lines, "y"), "many")


def test_it_has_a_dark_theme_and_its_pictures_follow_it(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert 'content="light dark"' in page
    drawn = draw(Plot("t", "x", "y", [Line("a", [1.0, 2.0], [1.0, 2.0])], levels={"level": 1.5}), "Z1-0")
    assert "var(--p0)" in drawn
    assert "var(--ink)" in drawn
    assert not re.search(r"(fill|stroke): ?#(?!000000)", drawn)
